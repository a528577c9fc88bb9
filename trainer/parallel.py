"""How processes share one model: each has all of it (DDP), or a share of it (FSDP2), on one machine or several.

Written on torch's own `fully_shard`, so parameters keep their names: what one arrangement saves, every other reads.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer import optimizers
from trainer.checkpoint_plan import Plan, Progress, Window
from trainer.contract.rendezvous import Parallelism
from trainer.contract.train import TrainConfig
from trainer.faults import Fault, UserFault
from trainer.ipc import Part
from trainer.snapshot import Held, Local, Stored, Writer, joined, parts

TIMEOUT = timedelta(minutes=10)
"""After which a process that waits for a lost one gives up."""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOST = ("closed by peer", "reset by peer", "Broken pipe", "timed out", "Timed out", "Connection refused")


def join(how: Parallelism, *, cpu: bool) -> None:
    """Meets the other processes of the launcher, if there are any.

    Beside NCCL stands gloo where shares lie in host memory, since norms are summed there.
    """
    if "RANK" in os.environ and not distributed.is_initialized():
        on_gpus = "cpu:gloo,cuda:nccl" if how.offload else "nccl"
        distributed.init_process_group("gloo" if cpu else on_gpus, timeout=TIMEOUT)


def leave() -> None:
    """Parts from the others at a good end."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether this process only saw that another one has gone."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and distributed.is_initialized() and any(s in str(error) for s in LOST)


class Copies:
    """All of the model in each process, which is alone or beside others with other rows (DDP)."""

    divided = False
    name = "ddp"

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.world, self.rank = accelerator.num_processes, accelerator.process_index

    def takes(self, config: TrainConfig) -> None:
        """Raises UserFault for what cannot be trained so."""

    def told(self) -> str:
        """The processes, what they run on, and how, for people; numbers differ where it does."""
        device = self.accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"{self.world} x {name} ({self.name}, torch {torch.__version__})"

    def build(self, make: Callable[[bool], Any]) -> Any:
        """The model on this process's device. `make(hollow)` makes it; hollow: without its weights."""
        return make(False).to(self.accelerator.device)

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """(what is called in training, the optimizer)"""
        prepared: tuple[Any, Any] = self.accelerator.prepare(model, optimizer)
        return prepared

    def collecting(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Around all micro-batches of a step but the last: gradients are summed over processes once."""
        manager: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return manager

    def writer(self) -> Writer | None:
        """This process's share of the writing; None where another one writes the same."""
        return Writer() if self.rank == 0 else None

    def plan(self, held: Held, writer: Writer | None) -> Plan | None:
        """What lies where, for the first process; entered by all."""
        return joined([parts(held, writer)]) if writer is not None else None

    def whole(self, model: Any, trained: Mapping[str, Any] | None) -> dict[str, torch.Tensor] | None:
        """Whole tensors in the first process's host memory, None where the model itself has them; entered by all.

        `trained`: only these; None: all of the model.
        """
        return None

    def settle(self, model: Any) -> None:
        """Before weights are changed by others than the optimizer."""

    def any_of(self, *facts: bool) -> tuple[bool, ...]:
        """True for all where it is for one, so that all leave the loop and save at the same step. Entered by all."""
        if self.world == 1:
            return facts
        flags = torch.tensor([int(fact) for fact in facts], device=self.accelerator.device)
        return tuple(bool(flag) for flag in self.accelerator.reduce(flags, reduction="sum").tolist())

    def agree(self, progress: Progress) -> None:
        """Machines restore by themselves: refuses what would go on from different places. Entered by all."""
        if self.world == 1:
            return
        places: list[Any] = [None] * self.world
        distributed.all_gather_object(places, (progress.step, progress.samples))
        if other := next((p for p in places if p != places[0]), None):
            raise Fault(
                f"checkpoint: some processes stand at step {places[0][0]}, some at step {other[0]}, since a machine "
                "could not restore what the first one did; another attempt may"
            )


class Shares(Copies):
    """FSDP2: each process holds a share of every layer, and has a layer whole only while it computes it."""

    divided = True

    def __init__(self, accelerator: Accelerator, how: Parallelism, precision: str) -> None:
        super().__init__(accelerator)
        self._shard = how.shard or self.world
        if self.world % self._shard:
            raise UserFault(f"world.parallelism.shard: {self._shard} does not divide {self.world} processes")
        self._how, self._type = how, PRECISIONS.get(precision)
        self.name = f"fsdp over {self._shard}{', in host memory' if how.offload else ''}"
        shape = (self.world // self._shard, self._shard)
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("copies", "shares"))
        self._mesh: DeviceMesh = mesh if shape[0] > 1 else mesh["shares"]
        self._nonce = _told(secrets.token_hex(4))

    def takes(self, config: TrainConfig) -> None:
        if config.quantised is not None:
            raise UserFault("train.method.kind: qlora's base cannot be divided by FSDP; use lora, or a plan with DDP")

    def build(self, make: Callable[[bool], Any]) -> Any:
        """The first process alone reads the weights, into host memory, and hands out the shares."""
        model = make(self.rank > 0)
        if self.rank > 0:
            _fill(model)
        source = {name: t.detach() for name, t in _tensors(model)}
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        policy = MixedPrecisionPolicy(param_dtype=self._type, reduce_dtype=torch.float32 if self._type else None)
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self._how.offload else OffloadPolicy()
        for layer in layers(bare):
            fully_shard(layer, mesh=self._mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(bare, mesh=self._mesh, mp_policy=policy, offload_policy=offload)
        if hasattr(bare, "generate"):
            register_fsdp_forward_method(bare, "generate")
        with torch.no_grad():
            for name, tensor in _tensors(model):
                self._hand_out(tensor, source.pop(name))
        return model

    def _hand_out(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        whole = source.to(self.accelerator.device).contiguous()
        distributed.broadcast(whole, 0)
        start, shape = window(tensor)
        mine = whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        local(tensor).copy_(mine)

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Autocast as elsewhere, so that what torch computes in float32 there is so here as well."""
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return model, self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def collecting(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Gradients are divided after every micro-batch: whole ones would take as much as the model."""
        return contextlib.nullcontext()

    def writer(self) -> Writer | None:
        if self.rank >= self._shard:
            return None
        here = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        beside = tuple(r for r in range(self._shard) if r // here[1] == here[0])
        nodes = -(-self._shard // here[1])
        part = Part(node=here[0], nodes=nodes, nonce=self._nonce) if nodes > 1 else None
        return Writer(number=self.rank, of=self._shard, beside=beside, part=part)

    def plan(self, held: Held, writer: Writer | None) -> Plan | None:
        own = parts(held, writer) if writer is not None else None
        all_parts: list[Any] = [None] * self.world
        distributed.all_gather_object(all_parts, own)
        return joined([p for p in all_parts if p is not None]) if self.rank == 0 else None

    def whole(self, model: Any, trained: Mapping[str, Any] | None) -> dict[str, torch.Tensor] | None:
        wanted = None if trained is None else {id(p) for p in trained.values()}
        found: dict[str, torch.Tensor] = {}
        known: dict[int, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if wanted is not None and id(tensor) not in wanted:
                continue
            if id(tensor) not in known:
                full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
                known[id(tensor)] = full.cpu() if self.rank == 0 else torch.empty(0)
            found[name] = known[id(tensor)]
        return found if self.rank == 0 else None

    def settle(self, model: Any) -> None:
        """What is held whole after an evaluation is let go, else it would be computed with once more."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def of(how: Parallelism, accelerator: Accelerator, precision: str) -> Copies:
    """The arrangement that the plan asks for; a process alone holds everything. Raises UserFault."""
    if how.kind == "ddp" or accelerator.num_processes == 1:
        return Copies(accelerator)
    return Shares(accelerator, how, precision)


def window(tensor: torch.Tensor) -> Window:
    """Which part of a tensor this process has."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start), tuple(shape)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """That part, sharing its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is divided as the parameter is, out of this process's part."""
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


def held(tensors: Mapping[str, torch.Tensor]) -> dict[str, Local]:
    """What this process has of each."""
    return {
        n: Local(tensor=local(t), start=window(t)[0], whole=tuple(t.shape), divided=isinstance(t, DTensor))
        for n, t in tensors.items()
    }


def load_model(parameters: Mapping[str, torch.Tensor], stored: Stored) -> None:
    """Puts the weights back, of each this process's part. Raises ValueError."""
    if gone := set(parameters) ^ set(stored.names("model")):
        raise ValueError(f"{sorted(gone)[0]} is trained in only one of the two")
    for name, parameter in parameters.items():
        if stored.shape("model", name) != tuple(parameter.shape):
            raise ValueError(f"{name} has the shape {stored.shape('model', name)}, here {tuple(parameter.shape)}")
        local(parameter).copy_(stored.read("model", name, window(parameter)))


def load_optimizer(optimizer: Any, parameters: Mapping[str, torch.Tensor], stored: Stored) -> None:
    """Puts the moments back; torch itself moves each tensor to where it belongs. Raises KeyError, ValueError."""
    by_id = {id(p): name for name, p in parameters.items()}
    number_of = {by_id[id(p)]: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, torch.Tensor | int]] = {}
    for key in stored.names("optimizer"):
        name, kind = key.rsplit("/", 1)
        parameter = parameters[name]
        value: torch.Tensor | int
        if stored.shape("optimizer", key) == tuple(parameter.shape):
            value = like(parameter, stored.read("optimizer", key, window(parameter)))
        else:
            value = optimizers.state(stored.read("optimizer", key))
        state.setdefault(number_of[name], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def number(value: torch.Tensor) -> float:
    """A value that processes may have parts of; entered by all."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and buffers by name, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """What is repeated: the items of the outermost lists of modules."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from (item for item in child if next(item.parameters(), None) is not None)
        else:
            yield from layers(child)


def _fill(model: torch.nn.Module) -> None:
    """Gives memory to what has none. Nothing is written to it, so that the kernel need not find any."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = known.setdefault(id(parameter), empty)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = known.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))


def _told(value: str) -> str:
    """The first process's value."""
    box = [value]
    distributed.broadcast_object_list(box, 0)
    return box[0]
