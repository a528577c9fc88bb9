"""LoRA adapters: wrapping a loaded model with peft, choosing the target modules, and saving the adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.contract.train import LowRank, TrainConfig
from trainer.core.errors import UserFault
from trainer.models.loading import has_experts

ATTENTION = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "query_key_value", "c_attn", "Wqkv", "dense",
    "q", "k", "v", "o", "query", "key", "value", "query_proj", "key_proj", "value_proj",
    "q_lin", "k_lin", "v_lin", "out_lin",
})  # fmt: skip
"""Names of attention modules that the target `attention` selects."""
HEADS = "classifier.", "score."
"""Prefixes of modules in the heads that peft itself trains and saves whole for a classification."""

UNMERGEABLE = (
    "output.merge: an adapter on the output layer of an encoder-decoder with shared embeddings cannot be merged; set "
    "output.merge: false, or choose other train.method.targets"
)


def wrap(
    model: Any,
    config: TrainConfig,
    peft_type: str | None = "CAUSAL_LM",
    new_modules: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> Any:
    """Add the configured adapters, and turn on gradient checkpointing if the configuration does.

    `peft_type`: value of peft's `task_type`. `targets`: names of modules that get adapters, in place of the configured
    ones. `new_modules`: modules with new weights, which are trained and saved whole, also with a LoRA.
    """
    if config.adapters is not None:
        for parameter in model.parameters():
            parameter.requires_grad = False
        model = _with_adapters(model, config, config.adapters, peft_type, new_modules, targets)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if config.recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.adapters is not None:
            model.enable_input_require_grads()
    return model


def _with_adapters(
    model: Any,
    config: TrainConfig,
    method: LowRank,
    peft_type: str | None,
    new_modules: Sequence[str],
    targets: Sequence[str],
) -> Any:
    import peft

    lora = peft.LoraConfig(
        r=method.r,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        use_rslora=method.rslora,
        use_dora=method.dora,
        target_modules=list(targets) or target_modules(model, method),
        task_type=peft_type,
        modules_to_save=[name for name in new_modules if peft_type is None or not name.startswith(HEADS)] or None,
    )
    wrapped = peft.get_peft_model(model, lora)
    # The artifact contains a folder's name or a Hub id, because a full path is useless on another machine.
    wrapped.peft_config["default"].base_model_name_or_path = (
        Path(config.model).name if Path(config.model).is_dir() else config.model
    )
    return wrapped


def untie_adapted_head(model: Any) -> None:
    """Give a model its own output weights if an adapter of them is merged and the input embeddings share them.

    The merge would otherwise change the embeddings too, which the adapter has never changed. Raises UserFault for an
    encoder-decoder, whose embeddings a saved model with untied weights would lack.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
    if not isinstance(head, BaseTunerLayer):
        return
    layer: Any = head.get_base_layer()
    if layer.weight is embeddings.weight:
        if base.config.is_encoder_decoder:
            raise UserFault(UNMERGEABLE)
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        for config in (base.config, base.config.get_text_config()):
            config.tie_word_embeddings = False
        base.all_tied_weights_keys = {}


def check_mergeable(model: Any, method: LowRank) -> None:
    """Raise UserFault for a model without adapters if `untie_adapted_head` would refuse its merge."""
    if not getattr(model.config, "is_encoder_decoder", False) or isinstance(method.targets, str):
        return
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    is_target = any(f".{name}".endswith(f".{target}") for name in names for target in method.targets)
    if is_target and head.weight is model.get_input_embeddings().weight:
        raise UserFault(UNMERGEABLE)


def target_modules(model: Any, method: LowRank) -> str | list[str]:
    """Return the names of the modules that get adapters, for peft. Raises UserFault for a name without a module.

    For a mixture "all-linear" must not reach peft, because peft would also add adapters to the experts, which are no
    linear modules. Such adapters have many times the size of the estimate, and peft refuses them with dropout.
    """
    if method.targets == "all-linear" and not has_experts(model):
        return "all-linear"
    if method.targets in ("all-linear", "attention"):
        names = ATTENTION & {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        if not names:
            raise UserFault("train.method.targets: no attention layer known in this model; use all-linear")
        return sorted(names - {"dense"} if "query" in names else names)  # "dense" also matches an encoder's MLP.
    linear_modules = [name for name, module in model.named_modules() if _adaptable(module)]
    for target in method.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear_modules):
            known_endings = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear_modules}))
            raise UserFault(
                f"train.method.targets: {target!r} matches no linear module of this model; it has {known_endings}"
            )
    return list(method.targets)


def _adaptable(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (torch.nn.Linear, Conv1D))


def save_adapter(folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write the adapters and the modules trained whole in peft's format. `state`: tensors to save instead."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir()
    adapter = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    tensors = {n: t.detach().cpu().contiguous() for n, t in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = model.peft_config["default"]
    training, settings.inference_mode = settings.inference_mode, True
    try:
        settings.save_pretrained(folder)
    finally:
        settings.inference_mode = training
