"""Several processes for the tracer: one real process, and others that torch's fake process group simulates.

The trainer's own wrapping runs, so DDP's buckets and FSDP 2's shards, gathers, prefetches and reductions are torch's.
On the meta device nothing is sent. This module answers calls that need numbers or streams of a device.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import accelerate
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from trainer.contract.documents import Parallelism
from trainer.memtrace.storage_tracker import Storages
from trainer.parallel.ddp import DataParallel, StableBucketDDP
from trainer.parallel.fsdp import FullyShardedParallel, build_arrangement

META = torch.device("meta")
WRAPPER = "torch.nn.parallel.distributed."


@contextlib.contextmanager
def joined(world: int) -> Iterator[None]:
    """Make this process the first of `world`, or keep the real process group if one exists."""
    if world == 1 or distributed.is_initialized():
        yield
        return
    from accelerate.state import AcceleratorState
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    place["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # otherwise accelerate logs its choice
    AcceleratorState._reset_state(True)  # a process has one state, which may have been created for world size 1
    with mock.patch.dict(os.environ, place):
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield
        finally:
            distributed.destroy_process_group()
            AcceleratorState._reset_state(True)


class WeightlessFsdp(FullyShardedParallel):
    """FSDP for a model without weights: nothing is distributed, and the gathered tensors have no data either."""

    def _apply_fully_shard(self, bare: Any, mesh: Any) -> None:
        super()._apply_fully_shard(bare, mesh)
        for group in _groups(bare):
            group.device = META
            for parameter in group.fsdp_params:
                parameter.device = META

    def _load_shard(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        pass


class SingleRank(DataParallel):
    """DDP whose model stays on the device on which it was built."""

    def build(self, make: Callable[[bool], Any]) -> Any:
        return make(False)


def arrangement(accelerator: accelerate.Accelerator, precision: str, *, divided: bool, meta: bool) -> DataParallel:
    """Return the trainer's own arrangement over the existing processes."""
    parallelism = Parallelism(kind="fsdp" if divided else "ddp")
    if not meta:
        return build_arrangement(parallelism, accelerator, precision)
    return WeightlessFsdp(accelerator, parallelism, precision) if divided else SingleRank(accelerator)


def _groups(model: torch.nn.Module) -> Iterator[_fsdp_param_group.FSDPParamGroup]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def gathered(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the unsharded trained weights, as a layer has them during computation. They exist after the first step."""
    for group in _groups(model):
        yield from (p._unsharded_param for p in group.fsdp_params if p.sharded_param.requires_grad)


def fake_result(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation that needs other processes or numbers; None for all other operations."""
    if func.namespace == "c10d":
        c10d: Any = torch._C._distributed_c10d
        future: Any = torch.futures.Future()
        future.set_result(args[0] if isinstance(args[0], list) else [args[0]])
        return args[0], c10d._create_work_from_future(future).boxed()
    if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
        return args[0]  # DDP's order of buckets, which the first process sends to itself
    return None


@contextlib.contextmanager
def recording_communication(storages: Storages, *, meta: bool) -> Iterator[None]:
    """Count communication buffers in their own category, and record storages that FSDP 2 empties and refills."""
    with contextlib.ExitStack() as patches:
        for owner, name in (
            (_fsdp_param_group, "foreach_all_gather"),
            (_fsdp_param_group, "foreach_all_gather_copy_out"),
            (_fsdp_param_group, "foreach_reduce"),
            (StableBucketDDP, "__init__"),
        ):
            patches.enter_context(mock.patch.object(owner, name, _exchanging(getattr(owner, name), storages)))
        patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resizing(storages)))
        if meta:
            storages.replacements.append(fake_result)
            patches.enter_context(mock.patch.object(_fsdp_collectives, "_get_device_handle", return_value=torch.cpu))
            patches.enter_context(mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params"))
            patches.enter_context(mock.patch(f"{WRAPPER}_verify_param_shape_across_processes"))
            patches.enter_context(mock.patch(f"{WRAPPER}_sync_module_states"))
        yield


def _exchanging(function: Callable[..., Any], storages: Storages) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with storages.all_as("communication"):
            return function(*args, **kwargs)

    return run


def _resizing(storages: Storages) -> Callable[[torch.UntypedStorage, int], Any]:
    resize: Any = torch.UntypedStorage.resize_

    def run(storage: torch.UntypedStorage, size: int) -> Any:
        resized = resize(storage, size)
        storages.resized(storage)
        return resized

    return run
