"""The model to tune: loaded, wrapped, and its tensors named for the checkpoint."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from trainer.contract.architectures import model_misuse_message
from trainer.contract.train import LowRank, QloraConfig, TrainConfig
from trainer.core.errors import Fault, UserFault
from trainer.models import (
    accelerations as switches,
)
from trainer.models import (
    availability as reach,
)
from trainer.models import (
    missing_weights as gaps,
)
from trainer.models import (
    remote_code as trust,
)

ATTENTION = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "query_key_value", "c_attn", "Wqkv", "dense"),
        *(
            "q",
            "k",
            "v",
            "o",
            "query",
            "key",
            "value",
            "query_proj",
            "key_proj",
            "value_proj",
            "q_lin",
            "k_lin",
            "v_lin",
            "out_lin",
        ),
    }
)

# bitsandbytes says of every product what its input is cast to; torchao, at every start, which of its kernels are for
# other machines, and torch that torchao registers enums as it should not any more.
for _noisy in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
UNREAD = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
"""What transformers raises for a model that it cannot read; the last three its configs, for a value of another type."""
UNQUANTISED = r"(.*\.)?(classifier|pre_classifier|score|pooler|sequence_summary)(\.|$)"
"""Modules of a model for classes or a number that may be new, and are trained whole then."""
HEADS = "classifier.", "score."
"""Begin what lies within the modules that peft itself trains and saves whole for a classification."""
WITH_TOKENS = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
"""What has no other head than its output embeddings."""
KINDS = {
    "causal_lm": "a causal-LM",
    "text_classification": "a text-model",
    "text_regression": "a text-model",
    "token_classification": "a text-model",
    "seq2seq": "an encoder-decoder",
    "dpo": "a causal-LM",
    "reward_model": "a text-model",
    "image_classification": "a vision-model",
    "text_to_image": "a Stable-Diffusion",
}
"""What the model of each task is called."""
TAKES = {
    "AutoModelForCausalLM": "a decoder, such as llama or gpt2",
    "AutoModelForSeq2SeqLM": "an encoder-decoder, such as t5 or bart",
    "AutoModelForImageClassification": "a model of images, such as vit",
}
"""What the tasks of a class take; all others: a model of texts."""


def precision_of(config: TrainConfig, device: torch.device) -> str:
    """bf16, fp16 or fp32: `auto` is bf16 where the device computes it in hardware. Raises UserFault.

    On a CPU with AVX512-BF16 a step of SmolLM2-135M took less than half the time of fp32.
    """
    if config.precision == "auto":
        return "bf16" if _has_bf16(device) else "fp32"
    if config.precision == "fp16" and device.type == "cpu":
        raise UserFault("train.precision: fp16 needs a GPU; use auto")
    return config.precision


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def config_of(config: TrainConfig) -> Any:
    """config.json of a Hub id or a folder. Raises UserFault."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.model, **trust.loading(config))
    except UNREAD as e:
        raise unloadable(config, e) from None


def brings(config: TrainConfig, found: Any, architecture: str) -> bool:
    """Whether the model has a class of its own for that of transformers. `found`: its config."""
    return config.trust_remote_code and architecture in (getattr(found, "auto_map", None) or {})


def check_kind(config: TrainConfig, architecture: str) -> None:
    """Raises UserFault for a model that the task cannot train, before its rows and weights are read."""
    import transformers

    found = config_of(config)
    wrong = model_misuse_message(config.task, found.to_dict())
    known = brings(config, found, architecture) or type(found) in getattr(transformers, architecture)._model_mapping
    if not wrong and not known:
        takes = TAKES.get(architecture, "a model of texts")
        wrong = f"is of the kind {found.model_type}; task {config.task} takes {takes}"
    if wrong:
        raise UserFault(f"train.model: {config.model!r} {wrong}")


def tokenizer_of(config: TrainConfig, **options: Any) -> Any:
    """From a Hub id or a folder. Raises UserFault."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model, **trust.loading(config), **options)
    except UNREAD as e:
        raise unloadable(config, e) from None


def embeddings(config: TrainConfig) -> int | None:
    """Tokens that the model has embeddings of; None where its config does not say. Raises UserFault."""
    rows = getattr(config_of(config).get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) and rows > 0 else None


def largest(tokenizer: Any) -> int:
    """The highest id of its tokens."""
    return max(tokenizer.get_vocab().values(), default=0)


def told_apart(tokenizer: Any) -> str:
    """A hash of what texts become by this tokenizer and its chat template."""
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    marks = sorted(tokenizer.special_tokens_map.items())
    parts = (transformers.__version__, type(tokenizer).__name__, rules, tokenizer.chat_template, marks)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def image_processor_of(config: TrainConfig) -> Any:
    """From a Hub id or a folder; by Pillow, so that a resized picture is the same on every machine.

    Raises UserFault.
    """
    # transformers' own top level hides it where torchvision is absent, which this one does not use.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(config.model, backend="pil", **trust.loading(config))
    except UNREAD as e:
        raise unloadable(config, e) from None


def load(
    config: TrainConfig, precision: str, architecture: str, *, hollow: bool = False, **options: Any
) -> tuple[Any, list[str]]:
    """(model, modules with weights that are new) from a Hub id or a folder; safetensors only. Raises UserFault.

    `hollow`: without its weights, which another process reads.

    A LoRA base is kept in the compute precision, since it takes no updates; full weights stay float32 and are
    computed in it by autocast.
    """
    import transformers

    kept = torch.float32
    if config.adapters is not None:
        kept = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if config.quantised is not None:
        options["quantization_config"] = _quantisation(config.quantised, kept, architecture)
    if config.attention != "auto":
        options["attn_implementation"] = switches.attention(config.attention)
    if hollow:
        options["device_map"] = {"": "meta"}
    try:
        model, report = getattr(transformers, architecture).from_pretrained(
            config.model,
            dtype=kept,
            use_safetensors=True,
            output_loading_info=True,
            **trust.loading(config),
            **{"ignore_mismatched_sizes": True, **options},  # refused below, in our own words
        )
    except UNREAD as e:
        raise unloadable(config, e) from None
    new = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    gaps.refuse_missing_weights(config, model, new, headed=architecture not in WITH_TOKENS)
    model.config.use_cache = False
    if config.quantised is not None:
        _prepare(model)
    return model, sorted({key.rsplit(".", 1)[0] for key in new})


def _quantisation(method: QloraConfig, compute: torch.dtype, architecture: str) -> Any:
    """Of all linear modules but heads."""
    from transformers import BitsAndBytesConfig

    left = None if architecture in WITH_TOKENS else [UNQUANTISED]
    if method.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=left)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=left,
    )


def _prepare(model: Any) -> None:
    """Norms to float32, as QLoRA's own code has them; embeddings and head stay in half precision, as there.

    bitsandbytes may not repack the base for evaluations on a CPU: that rounds its scales, for good. Raises UserFault.
    """
    if _has_experts(model):
        raise UserFault("train.method.kind: qlora quantises linear modules, and a mixture's experts are none; use lora")
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.float()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def unloadable(config: TrainConfig, error: Exception) -> Fault:
    """The line about a model that cannot be had: the user's fault, but for what the machine or the Hub failed at."""
    if not config.trust_remote_code and "custom code" in str(error):
        return UserFault(
            f"train.model: cannot load {config.model!r}: it needs code of its own; read it, and if you trust it set "
            "train.trust_remote_code: true"
        )
    if (fault := reach.not_read(config, error)) is not None:
        return fault
    told = (isinstance(error, StrictDataclassError) and error.__cause__) or error
    reason = (str(told).strip().splitlines() or [type(told).__name__])[0]
    what = KINDS[config.task]
    return UserFault(
        f"train.model: cannot load {config.model!r} ({reason}); give {what} Hub id that this machine may "
        "read, or a folder with config.json, safetensors and tokenizer files"
    )


def wrap(
    model: Any,
    config: TrainConfig,
    adapters: str | None = "CAUSAL_LM",
    fresh: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> Any:
    """Adds the adapters of a LoRA (`adapters`: peft's task type), turns on gradient checkpointing.

    `fresh`: modules whose weights no checkpoint gave. They are trained and saved whole, also by a LoRA.
    `targets`: names of modules, in place of the config's choice.
    """
    if config.adapters is not None:
        for parameter in model.parameters():
            parameter.requires_grad = False
        model = _with_adapters(model, config, config.adapters, adapters, fresh, targets)
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
    adapters: str | None,
    fresh: Sequence[str],
    targets: Sequence[str],
) -> Any:
    import peft

    lora = peft.LoraConfig(
        r=method.r,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        use_rslora=method.rslora,
        use_dora=method.dora,
        target_modules=list(targets) or chosen(model, method),
        task_type=adapters,
        modules_to_save=[name for name in fresh if adapters is None or not name.startswith(HEADS)] or None,
    )
    wrapped = peft.get_peft_model(model, lora)
    # A machine's path means nothing elsewhere: the artifact names the folder, or the Hub id as it is.
    wrapped.peft_config["default"].base_model_name_or_path = (
        Path(config.model).name if Path(config.model).is_dir() else config.model
    )
    return wrapped


def chosen(model: Any, method: LowRank) -> str | list[str]:
    """Names of the modules that get adapters, as peft takes them. Raises UserFault where one matches no module.

    A mixture's experts are no linear modules. By "all-linear" peft would take them as well, as it did where they still
    were: many times the adapters that the estimate reckons with, and refused with dropout.
    """
    if method.targets == "all-linear" and not _has_experts(model):
        return "all-linear"
    if method.targets in ("all-linear", "attention"):
        names = ATTENTION & {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        if not names:
            raise UserFault("train.method.targets: no attention layer known in this model; use all-linear")
        return sorted(names - {"dense"} if "query" in names else names)  # of an encoder it is the MLP's as well
    there = [name for name, module in model.named_modules() if _adaptable(module)]
    for wanted in method.targets:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in there):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in there}))
            raise UserFault(f"train.method.targets: {wanted!r} matches no linear module of this model; it has {known}")
    return list(method.targets)


def _has_experts(model: Any) -> bool:
    """Whether it is a mixture, whose experts are tensors of their own."""
    return any(".experts." in name and p.is_floating_point() for name, p in model.named_parameters())


def _adaptable(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (torch.nn.Linear, Conv1D))


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """What a checkpoint holds, by name: the adapters of a LoRA, every weight (tied ones once) of a full fine-tune."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def size(parameter: torch.nn.Parameter) -> int:
    """How many weights it is; a byte of a 4-bit base holds two."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else int(packed.shape.numel())


def save_adapter(folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
    """The adapters, and what was trained whole beside them, in peft's format. `state`: in place of the model's own."""
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


def save_whole(folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
    """As transformers saves it; `state`: in place of the model's own weights. It refuses settings for generation that
    contradict each other, with which it loads a model all the same: these are left as they were published.
    """
    settings: Any = getattr(model, "generation_config", None)
    if not (wrong := _contradicts(settings)):
        model.save_pretrained(folder, state_dict=state)
        return
    model.generation_config = type(settings)()
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.generation_config = settings
    if model.can_generate():
        settings.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])
        switches.notice(f"generation_config.json: {wrong}; it is left as it was published, mend it before it is used")


def _contradicts(settings: Any) -> str:
    """Why transformers would not save settings for generation, in one line; empty: it would."""
    if settings is None:
        return ""
    try:
        settings.validate(strict=True)
    except ValueError as e:
        return " ".join(str(e).splitlines()[:2])[:300]
    return ""
