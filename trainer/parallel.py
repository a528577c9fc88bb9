"""How processes share one model: each has all of it (DDP), or a share of it (FSDP2), on one machine or several.

Written on torch's own `fully_shard`, so parameters keep their names: what one arrangement saves, every other reads.
"""

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
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

from trainer import optimizers, tensor_parallel
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
        self.alike = 1
        """Processes that have the same rows."""

    @property
    def groups(self) -> int:
        """How many have rows of their own."""
        return self.world // self.alike

    @property
    def group(self) -> int:
        """Which of them this is."""
        return self.rank // self.alike

    @property
    def averaged(self) -> int:
        """Processes over which gradients are averaged."""
        return self.world

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

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over processes of what each has of its own rows; entered by all."""
        if self.world == 1:
            return value
        summed: torch.Tensor = self.accelerator.reduce(value, reduction="sum")
        return summed

    def clip(self, parameters: Iterable[torch.nn.Parameter], limit: float) -> float:
        """Scales the gradients down where their norm is above the limit; their norm before that. Entered by all."""
        return number(self.accelerator.clip_grad_norm_(parameters, limit))

    def writes(self, tensor: torch.Tensor) -> bool:
        """Whether this process, and no other, is the one to write what it has of a tensor."""
        return self.rank == 0

    def held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Local]:
        """What this process has of each."""
        return {
            n: Local(tensor=local(t), start=window(t)[0], whole=tuple(t.shape), mine=self.writes(t))
            for n, t in tensors.items()
        }

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
    """FSDP2: each process holds a share of every layer, and has a layer whole only while it computes it.

    Beside it, tensor parallelism: of each layer a process computes a part, and those that share one have the same rows.
    """

    divided = True

    def __init__(self, accelerator: Accelerator, how: Parallelism, precision: str) -> None:
        super().__init__(accelerator)
        self._how, self._type = how, PRECISIONS.get(precision)
        self._tensor = self.alike = how.tensor
        if self.world % self.alike:
            raise UserFault(f"world.parallelism.tensor: {self.alike} does not divide {self.world} processes")
        shard = how.shard or self.groups
        if self.groups % shard:
            raise UserFault(f"world.parallelism.shard: {shard} does not divide {self.groups} processes")
        self._owners = shard * self.alike
        """So many processes hold one copy."""
        if self.world > self._owners and shard == 1:
            raise UserFault("world.parallelism.shard: copies of a model that is divided by tensor only are not planned")
        self.name = f"fsdp over {shard}{', in host memory' if how.offload else ''}"
        if how.tensor > 1:
            self.name += f", tensor over {how.tensor}"
        sizes = {"dp_replicate_size": self.world // self._owners, "dp_shard_size": shard, "tp_size": how.tensor}
        mesh = ParallelismConfig(**sizes).build_device_mesh(accelerator.device.type)
        self._layers: DeviceMesh | None = mesh["tp"] if how.tensor > 1 else None
        copied = ("dp_replicate",) if self.world > self._owners else ()
        self._mesh: DeviceMesh | None = mesh[(*copied, "dp_shard_cp")] if shard > 1 else None
        self._nonce = _told(secrets.token_hex(4))

    @property
    def averaged(self) -> int:
        return self.groups

    def takes(self, config: TrainConfig) -> None:
        if config.quantised is not None:
            raise UserFault("train.method.kind: qlora's base cannot be divided by FSDP; use lora, or a plan with DDP")
        if self._layers is None:
            return
        if self._mesh is None and self._how.offload:
            raise UserFault("world.parallelism.offload: only shares are kept in host memory, and tensor makes none")
        if self._type is torch.float16:
            raise UserFault("train.precision: fp16's scaler does not know tensor parallelism; use bf16 or fp32")
        if config.adapters is not None and config.adapters.dora:
            raise UserFault("train.method.dora: not with tensor parallelism; set one of the two otherwise")

    def build(self, make: Callable[[bool], Any]) -> Any:
        """The first process alone reads the weights, into host memory, and hands out the shares."""
        model = make(self.rank > 0)
        if self.rank > 0:
            _fill(model)
        source = {name: t.detach() for name, t in _tensors(model)}
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self._layers is not None:
            tensor_parallel.divide(bare, self._layers)
        if self._mesh is not None:
            self._share_out(bare, self._mesh)
        else:
            model.to(self.accelerator.device)
        with torch.no_grad():
            for name, tensor in _tensors(model):
                self._hand_out(tensor, source.pop(name))
        return model

    def _share_out(self, bare: Any, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self._type, reduce_dtype=torch.float32 if self._type else None)
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self._how.offload else OffloadPolicy()
        for layer in layers(bare):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(bare, mesh=mesh, mp_policy=policy, offload_policy=offload)
        if hasattr(bare, "generate"):
            register_fsdp_forward_method(bare, "generate")

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

    def total(self, value: torch.Tensor) -> torch.Tensor:
        return super().total(value) / self._tensor

    def clip(self, parameters: Iterable[torch.nn.Parameter], limit: float) -> float:
        """As torch does it, of tensors that are divided in several ways."""
        if self._layers is None:
            return super().clip(parameters, limit)
        alike: dict[Any, list[torch.Tensor]] = {}
        for gradient in (p.grad for p in parameters if p.grad is not None):
            alike.setdefault(division(gradient), []).append(gradient)
        norm = math.hypot(*(number(torch.nn.utils.get_total_norm(some)) for some in alike.values()))
        for gradient in (g for some in alike.values() for g in some):
            local(gradient).mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    def writes(self, tensor: torch.Tensor) -> bool:
        """The first of those that have the same part of it."""
        if not isinstance(tensor, DTensor):
            return self.rank == 0
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert place is not None
        first = all(at == 0 for at, how in zip(place, tensor.placements, strict=True) if how.is_replicate())
        return first and (self.rank % self._tensor == 0 or "tp" in (mesh.mesh_dim_names or ()))

    def writer(self) -> Writer | None:
        if self.rank >= self._owners:
            return None
        here = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        beside = tuple(r for r in range(self._owners) if r // here[1] == here[0])
        nodes = -(-self._owners // here[1])
        part = Part(node=here[0], nodes=nodes, nonce=self._nonce) if nodes > 1 else None
        return Writer(number=self.rank, of=self._owners, beside=beside, part=part)

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


def division(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are divided among the same processes."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


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
