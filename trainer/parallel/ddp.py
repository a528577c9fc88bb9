"""Data parallelism: each process holds the whole model (DDP) and trains its own rows; base class of FSDP.

Uses torch's own parameter names, so every other arrangement can read what one arrangement saves.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.snapshot import Held, Local, SnapshotWriter, StoredSnapshot, joined, writer_plan
from trainer.contract.checkpoint_format import CheckpointPlan, Progress, Window
from trainer.contract.documents import Parallelism
from trainer.contract.train import TrainConfig
from trainer.core.errors import Fault
from trainer.optim import optimizers

TIMEOUT = timedelta(minutes=10)
"""Timeout after which a process that waits for a lost one fails."""
JOIN = timedelta(hours=1)
"""Time that the first processes wait for the others, whose machines may still fetch their inputs. A machine that is
lost meanwhile is detected by the broker.
"""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NEVER_FREED: list[Any] = []
"""Models that DDP wraps; they are never freed. Freeing such a model waits for gloo's thread, which after a collective
waits for Python: a deadlock, and the process never ends.
"""
LOST = ("closed by peer", "reset by peer", "Broken pipe", "timed out", "Timed out", "Connection refused")


def join(parallelism: Parallelism, *, cpu: bool) -> None:
    """Join the other processes of the launcher, if there are any.

    Raise DistError if they do not arrive within JOIN.

    If shards are in host memory, gloo runs in addition to NCCL, because the norms are then summed in host memory.
    """
    if "RANK" not in os.environ or distributed.is_initialized():
        return
    store, rank, world = next(rendezvous("env://", timeout=JOIN))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world)], JOIN)
    store.set_timeout(TIMEOUT)
    on_gpus = "cpu:gloo,cuda:nccl" if parallelism.offload else "nccl"
    backend = "gloo" if cpu else on_gpus
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)


def leave() -> None:
    """Leave the process group at a normal end."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error only says that another process is gone."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and distributed.is_initialized() and any(s in str(error) for s in LOST)


class StableBucketDDP(DistributedDataParallel):
    """DDP whose buckets are the same from the first step on.

    Torch rebuilds its own buckets after the first backward pass, by the order in which gradients came. The bucket of a
    gradient determines the order of its sum over three or more processes. So the first step after a resume would
    differ.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Return the last parameters first, about as their gradients come, so that sending overlaps with computing."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class DataParallel:
    """The whole model in each process; several processes have different rows (DDP)."""

    divided = False
    name = "ddp"

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.world: int = accelerator.num_processes
        self.rank: int = accelerator.process_index
        self.processes_per_group = 1
        """Number of processes that have the same rows."""

    @property
    def groups(self) -> int:
        """Number of groups; all processes of a group have the same rows."""
        return self.world // self.processes_per_group

    @property
    def group(self) -> int:
        """Number of this process's group."""
        return self.rank // self.processes_per_group

    @property
    def gradient_divisor(self) -> int:
        """Number of processes over which gradients are averaged."""
        return self.world

    def validate(self, config: TrainConfig) -> None:
        """Raise UserFault for a config that this arrangement cannot train."""

    def describe(self) -> str:
        """Describe processes, devices and versions for the user; results may differ where this text differs."""
        device, mixed = self.accelerator.device, self.accelerator.mixed_precision
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        computed = f"transformers {version('transformers')}, {'fp32' if mixed == 'no' else mixed}"
        return f"{self.world} x {name} ({self.name}, torch {torch.__version__}, {computed})"

    def build(self, make: Callable[[bool], Any]) -> Any:
        """Return the model on this process's device. `make(hollow)` builds it; hollow: without its weights."""
        return make(False).to(self.accelerator.device)

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return (the model to call in training, the optimizer)."""
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)
        if self.world > 1:
            prepared = StableBucketDDP(prepared)
            _NEVER_FREED.append(prepared)
        return prepared, self.accelerator.prepare_optimizer(optimizer)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager without all-reduce for all micro-batches of a step but the last."""
        manager: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return manager

    def shard_sequence(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this process's part of a training batch."""
        return batch

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes of a value that each computed from its rows; entered by all."""
        if self.world == 1:
            return value
        summed: torch.Tensor = self.accelerator.reduce(value, reduction="sum")
        return summed

    def first(self, loss: float, metrics: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return what the first process measured, so that all processes decide by equal bits. Entered by all."""
        if self.world == 1:
            return loss, dict(metrics)
        values = torch.tensor([loss, *metrics.values()], dtype=torch.float64, device=self.accelerator.device)
        distributed.broadcast(values, 0)
        return float(values[0]), dict(zip(metrics, values[1:].tolist(), strict=True))

    def clip(self, parameters: Iterable[torch.nn.Parameter], limit: float) -> float:
        """Clip the gradients to the norm `limit` and return the norm before. Entered by all."""
        return number(self.accelerator.clip_grad_norm_(parameters, limit))

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether this process alone writes its part of the tensor."""
        return self.rank == 0

    def held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Local]:
        """Return this process's part of each tensor."""
        return {
            n: Local(tensor=local(t), start=window(t)[0], whole=tuple(t.shape), mine=self.writes(t))
            for n, t in tensors.items()
        }

    def writer(self) -> SnapshotWriter | None:
        """Return the writer of this process's part; None if another process writes the same."""
        return SnapshotWriter() if self.rank == 0 else None

    def plan(self, local_state: Held, writer: SnapshotWriter | None) -> CheckpointPlan | None:
        """Return the layout of the checkpoint in the first process; entered by all."""
        return joined([writer_plan(local_state, writer)]) if writer is not None else None

    def whole(self, model: Any, trained: Mapping[str, Any] | None) -> dict[str, torch.Tensor] | None:
        """Return unsharded tensors in the first process's host memory, or None if the model itself has them.

        Entered by all. `trained`: only these; None: all of the model.
        """
        return None

    def reshard(self, model: Any) -> None:
        """Reshard gathered weights; called before weights change outside the optimizer. DDP gathers none."""

    def any_rank(self, *facts: bool) -> tuple[bool, ...]:
        """Return for each fact whether it is true in any process, so that all processes save at the same step.

        Entered by all.
        """
        if self.world == 1:
            return facts
        flags = torch.tensor([int(fact) for fact in facts], device=self.accelerator.device)
        return tuple(bool(flag) for flag in self.accelerator.reduce(flags, reduction="sum").tolist())

    def agree(self, progress: Progress) -> None:
        """Raise Fault if processes restored different checkpoints, because each machine restores alone.

        Entered by all.
        """
        if self.world == 1:
            return
        places: list[Any] = [None] * self.world
        distributed.all_gather_object(places, (progress.step, progress.samples))
        if other := next((p for p in places if p != places[0]), None):
            raise Fault(
                f"checkpoint: some processes are at step {places[0][0]}, some at step {other[0]}, since a machine "
                "could not restore what the first one did; another attempt may"
            )


def window(tensor: torch.Tensor) -> Window:
    """Return the position and shape of this process's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start), tuple(shape)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part, which shares the tensor's memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def sharded_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor from this process's part that is sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part.to(local(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def division(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors sharded over the same processes."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def load_model(parameters: Mapping[str, torch.Tensor], stored: StoredSnapshot) -> None:
    """Restore this process's part of the weights. Raise ValueError for other names or shapes."""
    if difference := set(parameters) ^ set(stored.names("model")):
        raise ValueError(f"{sorted(difference)[0]} is trained in only one of the two")
    for name, parameter in parameters.items():
        if stored.shape("model", name) != tuple(parameter.shape):
            raise ValueError(f"{name} has the shape {stored.shape('model', name)}, here {tuple(parameter.shape)}")
        local(parameter).copy_(stored.read("model", name, window(parameter)))


def load_optimizer(optimizer: Any, parameters: Mapping[str, torch.Tensor], stored: StoredSnapshot) -> None:
    """Restore the moments; torch moves each tensor to its device. Raise KeyError, ValueError."""
    by_id = {id(p): name for name, p in parameters.items()}
    number_of = {by_id[id(p)]: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, torch.Tensor | int]] = {}
    for key in stored.names("optimizer"):
        name, kind = key.rsplit("/", 1)
        parameter = parameters[name]
        value: torch.Tensor | int
        if stored.shape("optimizer", key) == tuple(parameter.shape):
            value = sharded_like(parameter, stored.read("optimizer", key, window(parameter)))
        else:
            value = optimizers.state(stored.read("optimizer", key))
        state.setdefault(number_of[name], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def number(value: torch.Tensor) -> float:
    """Return the value of a tensor that may be sharded; entered by all."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the repeated layers: the items of the outermost lists of modules."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from (item for item in child if next(item.parameters(), None) is not None)
        else:
            yield from layers(child)
