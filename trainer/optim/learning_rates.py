"""Learning rates: published defaults for `optim.lr: auto`, and the schedule.

The default depends on task, method, optimizer and model size. A checkpoint contains the run's rate, so that a later
table does not change it. The schedule is a pure function of the step, so it needs no state in a checkpoint.
"""

import math
from typing import Any

from trainer.contract.checkpoint_format import Rate
from trainer.contract.train import TrainConfig

LORA_RATE_FACTOR = 10.0
"""Ratio of LoRA's best rate to that of a full fine-tune, for many models, tasks and ranks."""
LORA = "times 10 for LoRA (Schulman et al. 2025, LoRA Without Regret)"
NARROWEST = 1024
"""Smallest hidden size for the rule for language models; narrower models get the rate of this size."""
POWERS = {"llama": 0.781}
"""Measured exponent of the rule for language models, by model family."""
OTHER_POWER = 0.0775
"""Measured exponent of Qwen. All other families use it too, because it is nearly 0."""
BATCH = "by the root of the batch (Malladi et al. 2022)"
BOUNDS = 0.5, 2.0
"""Smallest and largest factor by which the batch size may change a rate."""

Base = tuple[float, float | None, int | None, str]
"""Rate of a full fine-tune, rate of LoRA (None: derived), rows per step in the source (None: unknown), source."""
ENCODER: Base = 2e-5, None, 32, "Devlin et al. 2019, appendix A.3"
BASES: dict[str, Base] = {
    "text_classification": ENCODER,
    "text_regression": ENCODER,
    "token_classification": ENCODER,
    "dpo": (5e-7, 5e-6, None, "alignment-handbook, zephyr-7b-beta, dpo/config_qlora.yaml"),
    "orpo": (8e-6, 8e-5, None, "TRL, examples/scripts/orpo.py"),
    "kto": (1e-6, None, None, "TRL, default of KTOConfig"),
    "reward_model": (1e-5, 1e-4, None, "TRL, examples/scripts/reward_modeling.py"),
    "image_classification": (2e-5, None, None, "transformers, examples/pytorch/image-classification"),
    "text_to_image": (1e-5, 1e-4, 4, "diffusers, examples/text_to_image"),
}
T5: Base = 1e-4, None, None, "transformers, docs of T5"
BART: Base = 3e-5, None, None, "fairseq, examples/bart, summarization"
ADAFACTOR: Base = 1e-3, None, 128, "Raffel et al. 2020, section 3.1.2"


def choose_rate(config: TrainConfig, model: Any) -> Rate:
    """Return the job's rate, or a published one for `auto`."""
    if config.optim.lr != "auto":
        return Rate(lr=config.optim.lr)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    shape: Any = bare.config
    family = str(getattr(shape, "model_type", ""))
    return published(config, family, int(getattr(shape, "hidden_size", 0) or 0))


def published(config: TrainConfig, family: str, width: int) -> Rate:
    """Return the published rate. `width`: the model's hidden size; 0: it has none."""
    full, lora, batch, source = _base(config, family, width)
    sources = [source]
    lr = full
    if config.adapters is not None:
        lr = lora if lora is not None else full * LORA_RATE_FACTOR
        sources += [] if lora is not None else [LORA]
    if batch is not None and batch != config.global_batch_rows:
        low, high = BOUNDS
        lr *= min(high, max(low, math.sqrt(config.global_batch_rows / batch)))
        sources.append(f"{BATCH}, {config.global_batch_rows} rows for {batch}")
    return Rate(lr=float(f"{lr:.3g}"), source="; ".join(sources))


def total_steps(config: TrainConfig, rows: int) -> int:
    """Return the number of optimizer steps of the whole job over `rows` training rows."""
    if config.max_steps is not None:
        return config.max_steps
    return max(1, math.ceil(config.epochs * rows / config.global_batch_rows))


def learning_rate(peak: float, warmup_share: float, step: int, total: int) -> float:
    """Return the rate of optimizer step `step` (from 0).

    The schedule is a linear warm-up, then a cosine to zero (Loshchilov, Hutter 2017, eq. 5).
    """
    warmup = round(warmup_share * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _base(config: TrainConfig, family: str, width: int) -> Base:
    if config.optim.name == "adafactor":
        return ADAFACTOR
    if config.task == "seq2seq":
        return T5 if family in ("t5", "mt5", "umt5") else BART
    if config.task == "causal_lm":
        power = POWERS.get(family, OTHER_POWER)
        lr = 5e-5 * (2000 / max(NARROWEST, width)) ** power if width else 5e-5
        return lr, None, 128, f"Schulman et al. 2025, 5e-5 (2000 / hidden size)^{power} for {family or 'this model'}"
    return BASES[config.task]
