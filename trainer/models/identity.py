"""What a model brings beside its weights, and must be the same when a training goes on: its tokenizer and its config.

A checkpoint of a full fine-tune holds all weights, so it takes any model of their shapes; with other tokens for the
same texts it would unlearn. All is told apart by content that a newer library reads alike, wherever the folder lies.
"""

import hashlib
from typing import Any

from trainer.contract.checkpoint_format import ModelFingerprint
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading as models

PROBE = "The 3rd café cost\n\t$1,234.50 – naïve, 北京, Москва; x_y == f(z)  # DON'T 🙂"
"""By which the rules of a tokenizer are told apart beside its vocabulary."""
PASSING = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "auto_map"})
"""What of a config.json says how it was saved, or is said by the job."""


def of(config: TrainConfig, tokenizer: Any, job: str) -> ModelFingerprint:
    """`job`: its id. Raises UserFault, and Fault where the Hub is to blame."""
    if not hasattr(tokenizer, "get_vocab"):  # what reads pictures
        return ModelFingerprint(job=job, config=_config(config))
    ids = [tokenizer(PROBE, add_special_tokens=special)["input_ids"] for special in (False, True)]
    return ModelFingerprint(
        job=job,
        tokens=_hash(sorted(tokenizer.get_vocab().items()), list(ids[0])),
        marks=_hash(list(ids[1]), tokenizer.eos_token_id, tokenizer.chat_template),
        config="" if config.task == "text_to_image" else _config(config),
    )


def check(config: TrainConfig, was: ModelFingerprint, now: ModelFingerprint) -> None:
    """`was`: a checkpoint's. Raises UserFault where it was made with another.

    Another job may add other marks, as chats do to a model of plain texts, and reach further; never by other tokens.
    """
    parts = {"tokenizer": (was.tokens, now.tokens)}
    if was.job == now.job:
        parts |= {"chat template, or other special tokens,": (was.marks, now.marks)}
        parts |= {"config.json": (was.config, now.config)}
    if wrong := next((what for what, (one, other) in parts.items() if one != other), None):
        raise UserFault(
            f"checkpoint: {config.model!r} has another {wrong} now than it was trained with; give the model that it "
            "began with, or a new job"
        )


def _config(config: TrainConfig) -> str:
    """As it was written: what transformers adds to it changes with the version."""
    from transformers import PreTrainedConfig

    try:
        found, _ = PreTrainedConfig.get_config_dict(config.model, revision=config.revision or "main")
    except models.UNREAD as e:
        raise models.unloadable(config, e) from None
    return _hash(sorted((n, v) for n, v in found.items() if n not in PASSING and not n.startswith("_")))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
