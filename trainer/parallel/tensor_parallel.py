"""Tensor parallelism: the layers of a model are divided by the plan that transformers has for it.

Each process has some of the heads and of the MLP's columns. Norms and embeddings are replicated. Adapters
follow their module: a column-wise module divides `lora_B`, a row-wise module `lora_A`.

transformers' `DistributedConfig` (5.24) is not used. It divides within `from_pretrained` only, where each process reads
the weights, and peft then refuses an adapted output head. Its mesh has no context parallelism, and its FSDP no fp16.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from trainer.core.errors import UserFault

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
STYLES = (*COLUMNS, "rowwise")
PARTIAL = "replicated_with_grad_allreduce"
"""Style of a norm within a head: transformers reduces its gradients again after every micro-batch."""
REPLICATED = ("embedding_rowwise", "embedding_colwise")
"""Styles of the plan that are not applied. FSDP shards the embeddings, which may be tied to the head."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def divide(bare: Any, mesh: DeviceMesh) -> None:
    """Divide the modules of a transformers model, with or without adapters. Raise UserFault before any change."""
    mesh_size = mesh.size()
    plan: dict[str, str] = getattr(bare, "tp_plan", None) or {}
    _refuse(bare, plan, mesh_size)
    several = Counter(id(p) for module in bare.modules() for p in module.parameters(recurse=False))
    for style, module in [*_planned(bare, plan)]:
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if style in STYLES and several[id(base.weight)] == 1:  # a head that is tied to the embeddings stays replicated
            _apply(base, style, mesh)
            side = getattr(module, "lora_B" if style in COLUMNS else "lora_A", {})
            for adapter in side.values():
                _apply(adapter, style, mesh)


def _planned(bare: Any, plan: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, module in bare.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style and style not in REPLICATED:
            yield style, module


def _apply(module: Any, style: str, mesh: DeviceMesh) -> None:
    style_class = ALL_PARALLEL_STYLES[style]
    for name, _ in list(module.named_parameters(recurse=False)):
        style_class.shard_param(module, name, mesh)
    style_class.install_forward(module, mesh)


def _refuse(bare: Any, plan: dict[str, str], mesh_size: int) -> None:
    kind = bare.config.model_type
    if not plan:
        raise UserFault(f"world.parallelism.tensor: transformers has no plan for a {kind} model; set it to 1")
    for style, module in _planned(bare, plan):
        learns = any(p.requires_grad for p in module.parameters())
        if style not in STYLES and (style != PARTIAL or learns):
            raise UserFault(f"world.parallelism.tensor: a {kind} model has {style} layers, not supported here")
    config = bare.config.get_text_config()
    for name in DIVIDED:
        if (count := getattr(config, name, None)) and count % mesh_size:
            raise UserFault(
                f"world.parallelism.tensor: {mesh_size} does not divide {name} of this {kind} model, {count}"
            )
    head = bare.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.out_features % mesh_size:
        raise UserFault(f"world.parallelism.tensor: {mesh_size} does not divide the vocabulary, {head.out_features}")
