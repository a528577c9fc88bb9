"""The tracer's step in processes that really share a model over gloo, with storages that are really allocated."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.trainer.support.workers import FORKS, HANGS_S
from trainer.agent.process.child import free_port
from trainer.memtrace.probe import TraceOptions
from trainer.parallel import launch

Segments = Mapping[str, Mapping[str, int]]


def allocated(events: Sequence[Any]) -> int:
    """Return the most bytes that were allocated beyond those at the start, by the allocator's own account."""
    most = held = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _watched(found: dict[str, int]) -> None:
    """Record the step's peak as the allocator counts it. The count omits frees of earlier memory, so `warm` runs twice
    and the step rebuilds no bucket."""
    from torch.profiler import ProfilerActivity, profile

    from trainer.memtrace.probe import Probe

    step, warm = Probe.run_step, Probe.warm

    def twice(probe: Probe) -> None:
        warm(probe)
        warm(probe)

    def run(probe: Probe) -> None:
        before = probe._storages.total
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step(probe)
        found["peak"] = before + allocated(seen.profiler.kineto_results.events())

    Probe.run_step, Probe.warm = run, twice  # type: ignore[method-assign,assignment]


def _to_another(sent: Any) -> Any:
    """Exchange a tensor with the other of two processes and return what arrived. The buffers are not of torch's
    allocator.
    """
    import numpy
    import torch
    from torch import distributed

    other = 1 - distributed.get_rank()
    own = torch.from_numpy(sent.contiguous().view(torch.uint8).numpy().copy())
    got = torch.from_numpy(numpy.empty(own.numel(), dtype=numpy.uint8))
    sending: Any = distributed.isend(own, other)
    distributed.recv(got, other)
    sending.wait()
    return got.view(sent.dtype).view(sent.shape)


def _plain_messages() -> None:
    """Replace FSDP2's collectives with messages, because gloo's own copy tensors and hold them for a while."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.utils._python_dispatch import _disable_current_modes

    def gather(self: Any, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        with _disable_current_modes(), torch.no_grad():
            parts = output_tensor.view(2, -1)
            parts[1 - distributed.get_rank()].copy_(_to_another(input_tensor))

    def reduce(self: Any, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        with _disable_current_modes(), torch.no_grad():
            rank = distributed.get_rank()
            parts = input_tensor.view(2, -1)
            torch.add(parts[rank], _to_another(parts[1 - rank]), out=output_tensor).div_(2)

    DefaultAllGather.__call__ = gather  # type: ignore[method-assign]
    DefaultReduceScatter.__call__ = reduce  # type: ignore[method-assign,assignment]


def _rank(
    out: Path, variables: Mapping[str, str], config: Mapping[str, Any], layers: int, asks: Sequence[TraceOptions]
) -> None:
    import torch
    from accelerate.state import AcceleratorState

    from trainer.contract.documents import Parallelism
    from trainer.memtrace import tracer as memtrace
    from trainer.parallel import ddp as parallel

    os.environ.update(variables)
    torch.set_num_threads(1)
    parallel.join(Parallelism(), cpu=True)
    watched: dict[str, int] = {}
    _watched(watched)
    _plain_messages()
    made = []
    for ask in asks:
        AcceleratorState._reset_state(True)
        segments = memtrace.trace(config, layers, ask, real=True)
        made.append({"segments": segments, "allocated": watched["peak"]})
    if variables["RANK"] == "0":
        out.write_text(json.dumps(made))
    os._exit(0)  # nothing is to be freed in an order that gloo's threads wait for


def really(
    folder: Path, config: Mapping[str, Any], layers: int, asks: Sequence[TraceOptions]
) -> list[tuple[Segments, int]]:
    """Return (bytes by category at each segment's peak, the allocator's peak) of every step."""
    out, master, many = folder / "made.json", f"127.0.0.1:{free_port()}", asks[0].gpus
    processes = [
        FORKS.Process(
            target=_rank,
            args=(
                out,
                launch.variables(n, processes_per_node=many, nodes=1, node=0, master=master),
                config,
                layers,
                list(asks),
            ),
        )
        for n in range(many)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * many, f"exit codes {codes}"
    return [(load["segments"], load["allocated"]) for load in json.loads(out.read_text())]
