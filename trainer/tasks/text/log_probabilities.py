"""Log-probabilities of answers, and the reference that preferences compare a model with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from trainer.batching.examples import IGNORED
from trainer.tasks.common.task_data import Batch


def answer_log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each row's answer in nats, float32."""
    return token_log_probabilities(model, batch, batch["labels"]).sum(1)


def token_log_probabilities(model: Any, batch: Batch, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but a row's first one, in nats, float32; 0 for IGNORED targets."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    return -functional.cross_entropy(logits.transpose(1, 2), targets[:, 1:], ignore_index=IGNORED, reduction="none")


@contextmanager
def frozen(model: Any) -> Iterator[Any]:
    """Give the module without its wrapper for processes, without gradients and dropout."""
    bare = getattr(model, "module", model)
    training = bare.training
    bare.eval()
    try:
        with torch.no_grad():
            yield bare
    finally:
        bare.train(training)
