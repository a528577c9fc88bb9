"""Check before loading that devices compute correctly, have free memory, and reach each other.

It takes a second or two, and fails after LIMIT_S, because a slower device is not usable either.
"""

import time
from datetime import timedelta

import torch
from torch import distributed

from trainer.core.errors import BadHost

LIMIT_S = 30.0
FREE_SHARE = 0.9
"""Share of a GPU's memory that must be free before this job uses any."""
SIZES = {"cuda": 4096, "cpu": 128}
TIMES = {"cuda": 8, "cpu": 1}
MESSAGE = 1 << 18
"""Numbers that each process sends to each other process."""


def check(device: torch.device) -> str:
    """Return the checks in one line; entered by all processes. Raise BadHost."""
    started = time.monotonic()
    words = [_memory(device)] if device.type == "cuda" else []
    words.append(_product(device))
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        words.append(_pairs(device, started + LIMIT_S))
    took = time.monotonic() - started
    if took > LIMIT_S:
        raise BadHost(f"host: {_name(device)} took {took:.0f} s for a check that takes seconds; try another machine")
    return f"host: {', '.join(words)}; checked in {took:.1f} s"


def _memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    if free < FREE_SHARE * total:
        used_gib = (total - free) / 2**30
        raise BadHost(f"host: {used_gib:.1f} GiB of {_name(device)}'s memory are in use by another process")
    return f"{free / 2**30:.0f} GiB free"


def _product(device: torch.device) -> str:
    """Check a product of small integers, whose products and sums are exact in float32 and, as factors, in bfloat16."""
    size = SIZES[device.type]
    at = torch.arange(size, dtype=torch.float32)
    left, right = torch.outer(at % 7, at % 5) % 3, torch.outer(at % 11, at % 3) % 2
    column_sums = (left.sum(0) @ right).to(device)  # sum over all rows of the product
    kinds = [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]
    for kind in kinds:
        left_factor, right_factor = left.to(device, kind), right.to(device, kind)
        for _ in range(TIMES[device.type]):
            product = left_factor @ right_factor
            if not bool(((product.float().sum(0) - column_sums).abs() <= 0.01 * column_sums.abs()).all()):
                raise BadHost(f"host: {_name(device)} computes wrong results (a product of integers in {kind})")
            if not torch.equal(product, left_factor @ right_factor):
                raise BadHost(f"host: {_name(device)} computes the same product twice with different results ({kind})")
    return "products correct"


def _pairs(device: torch.device, until: float) -> str:
    """Send each other process a message that only this process can have sent, and check the received ones."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    for shift in range(1, world):
        to, source = (rank + shift) % world, (rank - shift) % world
        sent = torch.full((MESSAGE,), rank * world + to, dtype=torch.int32, device=device)
        received = torch.zeros_like(sent)
        left = timedelta(seconds=max(1.0, until - time.monotonic()))
        try:
            sending = [
                distributed.P2POp(distributed.isend, sent, to),
                distributed.P2POp(distributed.irecv, received, source),
            ]
            for work in distributed.batch_isend_irecv(sending):
                work.wait(left)
        except RuntimeError as e:
            if "imed out" not in str(e):
                raise  # the other process is gone, and reports why
            raise BadHost(f"host: process {rank} does not reach {to}, or {source} does not reach it: {e}") from None
        if not bool((received == source * world + rank).all()):
            raise BadHost(f"host: data from process {source} to {rank} arrives corrupted")
    return f"{world} processes reach each other"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
