"""FSDP 2: the processes shard the model and, with tensor parallelism, also the computation of each layer.

Uses torch's `fully_shard` over the mesh of accelerate's `ParallelismConfig`, so parameters keep their names.
"""

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from trainer.checkpoint.snapshot import Held, SnapshotWriter, joined, writer_plan
from trainer.contract.checkpoint_format import CheckpointPlan
from trainer.contract.documents import Parallelism
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.core.ipc import SnapshotPart
from trainer.models import accelerations
from trainer.parallel import tensor_parallel
from trainer.parallel.context_parallel import ContextParallel
from trainer.parallel.ddp import DataParallel, division, layers, local, number, window

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FullyShardedParallel(DataParallel):
    """FSDP 2: each process holds a shard of every layer, and gathers a layer only while it computes it.

    With tensor or context parallelism, a group of processes gets the same rows. Each process then computes a part of
    every layer (tensor) or of the tokens (context).
    """

    divided = True

    def __init__(self, accelerator: Accelerator, parallelism: Parallelism, precision: str) -> None:
        super().__init__(accelerator)
        self._parallelism, self._type = parallelism, PRECISIONS.get(precision)
        self.processes_per_group = parallelism.tensor * parallelism.context
        if self.world % self.processes_per_group:
            raise UserFault(
                f"world.parallelism: tensor x context, {self.processes_per_group}, does not divide the "
                f"{self.world} processes"
            )
        shard = parallelism.shard or self.groups
        if self.groups % shard:
            raise UserFault(f"world.parallelism.shard: {shard} does not divide {self.groups} processes")
        if shard == 1 < self.groups:
            raise UserFault("world.parallelism.shard: 1 shards no model; set kind to ddp, or shard to more")
        self._owners = shard * self.processes_per_group
        """Number of processes that together hold one copy of the model."""
        several = {"tensor": parallelism.tensor, "context": parallelism.context}
        self.name = f"fsdp over {shard}{', in host memory' if parallelism.offload else ''}"
        self.name += "".join(f", {name} over {count}" for name, count in several.items() if count > 1)
        mesh = ParallelismConfig(
            dp_replicate_size=self.world // self._owners,
            dp_shard_size=shard,
            cp_size=parallelism.context,
            tp_size=parallelism.tensor,
        ).build_device_mesh(accelerator.device.type)
        copied = ("dp_replicate",) if self.world > self._owners else ()
        self._mesh: DeviceMesh | None = mesh[(*copied, "dp_shard_cp")] if shard * parallelism.context > 1 else None
        self._layers: DeviceMesh | None = mesh["tp"] if parallelism.tensor > 1 else None
        self._context = ContextParallel(mesh["cp"]) if parallelism.context > 1 else None
        self._nonce = _from_first_process(secrets.token_hex(4))

    @property
    def gradient_divisor(self) -> int:
        return self.world // self._parallelism.tensor

    def validate(self, config: TrainConfig) -> None:
        if config.quantised is not None:
            raise UserFault("train.method.kind: FSDP cannot shard qlora's base; use lora, or a plan with DDP")
        if self._context is not None and config.task != "causal_lm":
            raise UserFault(f"world.parallelism.context: only for causal_lm, this is {config.task}; set it to 1")
        if self._layers is None:
            return
        if self._mesh is None and self._parallelism.offload:
            raise UserFault("world.parallelism.offload: only shards are kept in host memory, and tensor makes none")
        if self._type is torch.float16:
            raise UserFault(
                "train.precision: fp16's gradient scaler does not support tensor parallelism; use bf16 or fp32"
            )
        if config.adapters is not None and config.adapters.dora:
            raise UserFault("train.method.dora: not with tensor parallelism; remove one of the two")

    def build(self, make: Callable[[bool], Any]) -> Any:
        """Build the model. The first process reads the weights into host memory and broadcasts each tensor.

        Each process keeps only its shard of a tensor.
        """
        model = make(self.rank > 0)
        if self.rank > 0:
            _materialise(model)
        source = {name: t.detach() for name, t in _tensors(model)}
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self._layers is not None:
            tensor_parallel.divide(bare, self._layers)
        if self._context is not None:
            self._context.attach(bare)
        if self._mesh is not None:
            self._apply_fully_shard(bare, self._mesh)
        else:
            model.to(self.accelerator.device)
        with torch.no_grad():
            for name, tensor in _tensors(model):
                self._load_shard(tensor, source.pop(name))
        return model

    def _apply_fully_shard(self, bare: Any, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self._type, reduce_dtype=torch.float32 if self._type else None)
        offload = (
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self._parallelism.offload else OffloadPolicy()
        )
        for layer in layers(bare):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(bare, mesh=mesh, mp_policy=policy, offload_policy=offload)
        if hasattr(bare, "generate"):
            register_fsdp_forward_method(bare, "generate")

    def _load_shard(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        full = source.to(self.accelerator.device).contiguous()
        distributed.broadcast(full, 0)
        start, shape = window(tensor)
        part = full[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        local(tensor).copy_(part)

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Use autocast as without FSDP, so that the same operations run in float32."""
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return model, self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Do not delay gradient reduction, because unsharded gradients would take as much memory as the model."""
        return contextlib.nullcontext()

    def total(self, value: torch.Tensor) -> torch.Tensor:
        return super().total(value) / self._parallelism.tensor

    def shard_sequence(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return batch if self._context is None else self._context.shard_sequence(batch)

    def clip(self, parameters: Iterable[torch.nn.Parameter], limit: float) -> float:
        """Clip the gradients as torch does, also if tensors are sharded over different processes."""
        if self._layers is None:
            return super().clip(parameters, limit)
        by_division: dict[Any, list[torch.Tensor]] = {}
        for gradient in (p.grad for p in parameters if p.grad is not None):
            by_division.setdefault(division(gradient), []).append(gradient)
        norm = math.hypot(*(number(torch.nn.utils.get_total_norm(some)) for some in by_division.values()))
        for gradient in (g for some in by_division.values() for g in some):
            local(gradient).mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return True if no process of lower rank holds the same part of the tensor."""
        if not isinstance(tensor, DTensor):
            return self.rank == 0
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert place is not None
        first: bool = all(
            at == 0 for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()
        )
        return first and (self.rank % self._parallelism.tensor == 0 or "tp" in (mesh.mesh_dim_names or ()))

    def writer(self) -> SnapshotWriter | None:
        if self.rank >= self._owners:
            return None
        node = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        machine_writers = tuple(r for r in range(self._owners) if r // node[1] == node[0])
        nodes = -(-self._owners // node[1])
        part = SnapshotPart(node=node[0], nodes=nodes, nonce=self._nonce) if nodes > 1 else None
        return SnapshotWriter(number=self.rank, of=self._owners, machine_writers=machine_writers, part=part)

    def plan(self, local_state: Held, writer: SnapshotWriter | None) -> CheckpointPlan | None:
        own = writer_plan(local_state, writer) if writer is not None else None
        all_parts: list[Any] = [None] * self.world
        distributed.all_gather_object(all_parts, own)
        return joined([p for p in all_parts if p is not None]) if self.rank == 0 else None

    def whole(self, model: Any, trained: Mapping[str, Any] | None) -> dict[str, torch.Tensor] | None:
        trained_ids = None if trained is None else {id(p) for p in trained.values()}
        tensors: dict[str, torch.Tensor] = {}
        by_id: dict[int, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if trained_ids is not None and id(tensor) not in trained_ids:
                continue
            if id(tensor) not in by_id:
                full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
                by_id[id(tensor)] = full.cpu() if self.rank == 0 else torch.empty(0)
            tensors[name] = by_id[id(tensor)]
        return tensors if self.rank == 0 else None

    def reshard(self, model: Any) -> None:
        """Reshard parameters that an evaluation left gathered; the next step would compute with the stale copies."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_arrangement(parallelism: Parallelism, accelerator: Accelerator, precision: str) -> DataParallel:
    """Return the plan's arrangement. A single process shards nothing and logs a notice. Raises: UserFault."""
    if parallelism.kind == "ddp":
        return DataParallel(accelerator)
    if accelerator.num_processes == 1:
        dimensions = [f"{name} {count}" for name in ("tensor", "context") if (count := getattr(parallelism, name)) > 1]
        accelerations.notice(
            f"{' and '.join(dimensions) or 'fsdp'}: a single process trains here, so nothing is sharded"
        )
        return DataParallel(accelerator)
    return FullyShardedParallel(accelerator, parallelism, precision)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights and buffers by name, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _materialise(model: torch.nn.Module) -> None:
    """Replace tensors on the meta device with empty tensors on the CPU.

    Their memory is not written, so the kernel need not allocate pages for it.
    """
    replaced: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = replaced.setdefault(id(parameter), empty)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = replaced.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))


def _from_first_process(value: str) -> str:
    """Return the first process's value."""
    box = [value]
    distributed.broadcast_object_list(box, 0)
    return box[0]
