"""Fingerprint of tokenizer and config; a checkpoint may only be resumed with the same fingerprint.

A checkpoint of a full fine-tune contains all weights, so it fits any model of the same shapes. With other token ids for
the same texts the model would unlearn. The fingerprint depends on content alone, not on folder or library version.
"""

import hashlib
from typing import Any

from trainer.contract.checkpoint_format import ModelFingerprint
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading

PROBE = "The 3rd café cost\n\t$1,234.50 – naïve, 北京, Москва; x_y == f(z)  # DON'T 🙂"
"""Text whose token ids distinguish tokenizers with the same vocabulary but other rules."""
IGNORED_FIELDS = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "auto_map"})
"""Fields of config.json that are excluded, because they depend on how it was saved or on the job."""


def fingerprint(config: TrainConfig, tokenizer: Any, job: str) -> ModelFingerprint:
    """Return the fingerprint for the job with the id `job`. Raises UserFault, and Fault if the Hub failed."""
    if not hasattr(tokenizer, "get_vocab"):  # An image processor.
        return ModelFingerprint(job=job, config=_config(config))
    ids = [tokenizer(PROBE, add_special_tokens=special)["input_ids"] for special in (False, True)]
    return ModelFingerprint(
        job=job,
        tokens=_hash(sorted(tokenizer.get_vocab().items()), list(ids[0])),
        marks=_hash(list(ids[1]), tokenizer.eos_token_id, tokenizer.chat_template),
        config="" if config.task == "text_to_image" else _config(config),
    )


def check(config: TrainConfig, stored: ModelFingerprint, current: ModelFingerprint) -> None:
    """Raise UserFault if a checkpoint's `stored` fingerprint differs from the `current` model's.

    A job that starts from another job's checkpoint must use the same token ids. Its special tokens and its config may
    differ, e.g. for chats after plain texts, or for a longer context.
    """
    parts = {"tokenizer": (stored.tokens, current.tokens)}
    if stored.job == current.job:
        parts |= {"chat template, or other special tokens,": (stored.marks, current.marks)}
        parts |= {"config.json": (stored.config, current.config)}
    if changed := next((name for name, (before, after) in parts.items() if before != after), None):
        raise UserFault(
            f"checkpoint: {config.model!r} has another {changed} now than it was trained with; give the model that it "
            "began with, or a new job"
        )


def _config(config: TrainConfig) -> str:
    """Return a hash of config.json as written, because the fields that transformers adds change with its version."""
    from transformers import PreTrainedConfig

    try:
        fields, _ = PreTrainedConfig.get_config_dict(config.model, revision=config.revision or "main")
    except loading.LOAD_ERRORS as e:
        raise loading.unloadable(config, e) from None
    return _hash(sorted((n, v) for n, v in fields.items() if n not in IGNORED_FIELDS and not n.startswith("_")))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
