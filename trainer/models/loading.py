"""Loading of models, tokenizers and image processors, and saving of whole models.

`trainer.models.adapters` adds LoRA adapters to a loaded model.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from trainer.contract.architectures import QUANTISED_EXPERTS, model_misuse_message
from trainer.contract.train import QloraConfig, TrainConfig
from trainer.core.errors import Fault, UserFault
from trainer.models import accelerations, availability, remote_code
from trainer.models.missing_weights import check_missing_weights

# bitsandbytes logs a cast of every matrix product. At every start torchao logs kernels for other machines, and
# torch logs a deprecated registration of enums by torchao.
for _noisy in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
"""Exceptions of transformers for a model that it cannot read; its configs raise the last three for a wrong type."""
UNQUANTISED = r"(.*\.)?(classifier|pre_classifier|score|pooler|sequence_summary)(\.|$)"
"""Pattern of head modules that may be new; they are trained whole and therefore not quantised."""
WITH_TOKENS = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
"""Classes whose only head is the output embeddings."""
MODEL_KINDS = {
    "causal_lm": "a causal-LM",
    "text_classification": "a text-model",
    "text_regression": "a text-model",
    "token_classification": "a text-model",
    "seq2seq": "an encoder-decoder",
    "dpo": "a causal-LM",
    "orpo": "a causal-LM",
    "kto": "a causal-LM",
    "reward_model": "a text-model",
    "image_classification": "a vision-model",
    "text_to_image": "a Stable-Diffusion",
}
"""Name of the kind of model that each task needs, for error messages."""
ACCEPTED = {
    "AutoModelForCausalLM": "a decoder, such as llama or gpt2",
    "AutoModelForSeq2SeqLM": "an encoder-decoder, such as t5 or bart",
    "AutoModelForImageClassification": "a model of images, such as vit",
}
"""Description of the model that each class loads, for error messages; other classes load a text model."""


def precision_of(config: TrainConfig, device: torch.device) -> str:
    """Return bf16, fp16 or fp32. `auto` is bf16 if the device computes it in hardware. Raises UserFault.

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
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def config_of(config: TrainConfig) -> Any:
    """Return config.json of a Hub id or a folder. Raises UserFault."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.model, **remote_code.load_options(config))
    except LOAD_ERRORS as e:
        raise unloadable(config, e) from None


def head_labels(config: TrainConfig) -> tuple[str, ...]:
    """Return the classes of the model's own head, in order; empty without names of its own. Raises UserFault."""
    names = getattr(config_of(config), "id2label", None) or {}
    ordered = tuple(str(names[number]) for number in sorted(names))
    is_default = all(name == f"LABEL_{number}" for number, name in enumerate(ordered))
    return () if is_default or len(set(ordered)) < len(ordered) else ordered


def has_own_class(config: TrainConfig, model_config: Any, architecture: str) -> bool:
    """Return True if the model's own code replaces the class `architecture` of transformers."""
    return config.trust_remote_code and architecture in (getattr(model_config, "auto_map", None) or {})


def check_kind(config: TrainConfig, architecture: str) -> None:
    """Raise UserFault for a model that the task cannot train. Reads no rows and no weights."""
    import transformers

    model_config = config_of(config)
    problem = model_misuse_message(config.task, model_config.to_dict())
    mapping = getattr(transformers, architecture)._model_mapping
    is_supported = has_own_class(config, model_config, architecture) or type(model_config) in mapping
    if not problem and not is_supported:
        accepted = ACCEPTED.get(architecture, "a model of texts")
        problem = f"is of the kind {model_config.model_type}; task {config.task} takes {accepted}"
    if problem:
        raise UserFault(f"train.model: {config.model!r} {problem}")


def tokenizer_of(config: TrainConfig, **options: Any) -> Any:
    """Return the tokenizer of a Hub id or a folder. Raises UserFault."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model, **remote_code.load_options(config), **options)
    except LOAD_ERRORS as e:
        raise unloadable(config, e) from None


def encoding_state(tokenizer: Any) -> tuple[Any, Any] | None:
    """Return truncation and padding of a fast tokenizer; None for others, which keep no state between calls."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else (backend.truncation, backend.padding)


def save_tokenizer(folder: Path, tokenizer: Any, state: tuple[Any, Any] | None) -> None:
    """Save a tokenizer with the truncation and padding of `encoding_state`. Calls leave their own in a fast one."""
    if state is not None:
        backend, (truncation, padding) = tokenizer.backend_tokenizer, state
        backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)
        backend.no_padding() if padding is None else backend.enable_padding(**padding)
    tokenizer.save_pretrained(folder)


def embeddings(config: TrainConfig) -> int | None:
    """Return the number of the model's token embeddings; None if its config has none. Raises UserFault."""
    rows = getattr(config_of(config).get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) and rows > 0 else None


def highest_token(tokenizer: Any) -> int:
    """Return the highest token id of the tokenizer."""
    return max(tokenizer.get_vocab().values(), default=0)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of all settings of a tokenizer that change its token ids, the chat template included."""
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    marks = sorted(tokenizer.special_tokens_map.items())
    parts = (transformers.__version__, type(tokenizer).__name__, rules, tokenizer.chat_template, marks)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def image_processor_of(config: TrainConfig) -> Any:
    """Return the image processor of a Hub id or a folder. Raises UserFault.

    It resizes with Pillow, so that a picture is the same on every machine.
    """
    # The top level of transformers hides the class without torchvision, which the Pillow backend does not use.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(config.model, backend="pil", **remote_code.load_options(config))
    except LOAD_ERRORS as e:
        raise unloadable(config, e) from None


def load(
    config: TrainConfig, precision: str, architecture: str, *, hollow: bool = False, **options: Any
) -> tuple[Any, list[str]]:
    """Load a model from a Hub id or a folder, from safetensors only. Raises UserFault.

    Returns the model and the names of the modules with new weights. `hollow`: load no weights, because another process
    reads them. A LoRA base has the compute precision, since it gets no updates. In a full fine-tune the weights are
    float32, and autocast computes in the compute precision.
    """
    import transformers

    dtype = torch.float32
    if config.adapters is not None:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if config.quantised is not None:
        options["quantization_config"] = _quantisation(config.quantised, dtype, architecture)
    if (kernel := accelerations.attention(config.attention)) is not None:
        options["attn_implementation"] = kernel
    if hollow:
        options["device_map"] = {"": "meta"}
    try:
        model, report = getattr(transformers, architecture).from_pretrained(
            config.model,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **remote_code.load_options(config),
            **{"ignore_mismatched_sizes": True, **options},  # check_missing_weights refuses them below.
        )
    except LOAD_ERRORS as e:
        raise unloadable(config, e) from None
    new_keys = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    check_missing_weights(config, model, new_keys, headed=architecture not in WITH_TOKENS)
    model.config.use_cache = False
    if config.quantised is not None:
        _prepare_quantised(model)
    return model, sorted({key.rsplit(".", 1)[0] for key in new_keys})


def hollow(config: TrainConfig, architecture: str, **options: Any) -> Any:
    """Return a model on the meta device, without weights, in evaluation mode. Raises UserFault.

    In training mode a batch norm refuses a single row, which a larger batch would make valid.
    `options`: arguments of `from_pretrained` for the model's head. Experts get bfloat16, which their products require.
    """
    import transformers

    model_config = config_of(config)
    for name in options.keys() - {"ignore_mismatched_sizes"}:
        setattr(model_config, name, options[name])
    more: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if has_own_class(config, model_config, architecture):
        # Without `code_revision`, transformers would load the current code, not the revision that the user read.
        more["code_revision"] = remote_code.load_options(config)["revision"]
    try:
        with torch.device("meta"):
            model = getattr(transformers, architecture).from_config(model_config, **more)
    except LOAD_ERRORS as e:
        raise unloadable(config, e) from None
    model.config.use_cache = False
    model.eval()
    return model.bfloat16() if has_experts(model) else model


def _quantisation(method: QloraConfig, compute: torch.dtype, architecture: str) -> Any:
    """Return the settings of bitsandbytes that quantise all linear modules except heads."""
    from transformers import BitsAndBytesConfig

    skipped = None if architecture in WITH_TOKENS else [UNQUANTISED]
    if method.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=skipped,
    )


def _prepare_quantised(model: Any) -> None:
    """Convert the norms of a quantised model to float32, as QLoRA's own code does. Raises UserFault for a mixture.

    Embeddings and head stay in half precision, as in that code. bitsandbytes must not repack the base for evaluations
    on a CPU, because this permanently rounds its scales.
    """
    check_quantisable(model)
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.float()
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def unloadable(config: TrainConfig, error: Exception) -> Fault:
    """Return the fault for a model that cannot be loaded: a UserFault, unless this machine or the Hub failed."""
    if not config.trust_remote_code and "custom code" in str(error):
        return UserFault(
            f"train.model: cannot load {config.model!r}: it needs its own code; read it, and if you trust it set "
            "train.trust_remote_code: true"
        )
    if (fault := availability.read_fault(config, error)) is not None:
        return fault
    cause = (isinstance(error, StrictDataclassError) and error.__cause__) or error
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    kind = MODEL_KINDS[config.task]
    return UserFault(
        f"train.model: cannot load {config.model!r} ({reason}); give {kind} Hub id that this machine may "
        "read, or a folder with config.json, safetensors and tokenizer files"
    )


def check_quantisable(model: Any) -> None:
    """Raise UserFault for a mixture of experts. Granite's experts are no `experts`, but of a class named so."""
    if has_experts(model) or any("Experts" in type(module).__name__ for module in model.modules()):
        raise UserFault(f"train.method.kind: {QUANTISED_EXPERTS}")


def has_experts(model: Any) -> bool:
    """Return True if the model is a mixture of experts, whose experts are tensors instead of linear modules."""
    return any(".experts." in name and p.is_floating_point() for name, p in model.named_parameters())


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that a checkpoint contains, by name.

    These are the adapters of a LoRA, or every weight (tied weights once) of a full fine-tune.
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def size(parameter: torch.nn.Parameter) -> int:
    """Return the number of weights of a parameter; a byte of a 4-bit base contains two."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else int(packed.shape.numel())


def save_whole(folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
    """Save the model with transformers' `save_pretrained`. `state`: tensors to save instead of the model's weights.

    transformers loads contradictory generation settings but refuses to save them, so they are saved as published.
    """
    settings: Any = getattr(model, "generation_config", None)
    if not (problem := _contradiction_message(settings)):
        model.save_pretrained(folder, state_dict=state)
        return
    model.generation_config = type(settings)()
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.generation_config = settings
    if model.can_generate():
        settings.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])
        accelerations.notice(f"generation_config.json: {problem}; saved as it was published; correct it before use")


def _contradiction_message(settings: Any) -> str:
    """Return the reason for which transformers refuses to save generation settings, in one line; empty: none."""
    if settings is None:
        return ""
    try:
        settings.validate(strict=True)
    except ValueError as e:
        return " ".join(str(e).splitlines()[:2])[:300]
    return ""
