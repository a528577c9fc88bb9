"""The seam between the loop and what it trains."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from trainer import model as models
from trainer.contract.data import DataError, read_rows
from trainer.contract.train import LoraConfig, TrainConfig
from trainer.dataset import by_size
from trainer.faults import DataFault

E = TypeVar("E")
Row = tuple[int, dict[str, Any]]
"""Number from 1, cells by column."""
Batch = dict[str, torch.Tensor]


class Task(ABC, Generic[E]):
    """One kind of fine-tune; `E` is one of its examples."""

    architecture: str
    """The class of transformers that loads the model."""
    adapters: str
    """peft's `task_type`."""
    headed = False
    """Modules whose weights no checkpoint gave are trained, and saved whole."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.pad = 0

    def examples(self, path: Path, data_format: Any) -> tuple[list[E], int]:
        """(examples, how many rows were dropped since nothing is learned from them). Raises UserFault, DataFault."""
        self.tokenizer = self._tokenizer()
        self.pad = next((t for t in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if t is not None), 0)
        try:
            found = list(self._encode(enumerate(read_rows(path.read_bytes(), data_format), 1)))
        except DataError as e:
            raise DataFault(str(e)) from None
        examples = [e for e in found if e is not None and self.targets(e) > 0]
        if not examples:
            raise DataFault(self._nothing())
        return examples, len(found) - len(examples)

    def model(self, precision: str, *, hollow: bool = False) -> Any:
        """The model, with adapters where they are asked for; after `examples`. Raises UserFault.

        `hollow`: without its weights, which another process reads and hands out.
        """
        model, fresh = models.load(self.config, precision, self.architecture, hollow=hollow, **self._head())
        self._settle(model)
        return models.wrap(model, self.config, self.adapters, fresh if self.headed else ())

    def check(self, model: Any, device: torch.device) -> None:
        """What can only be seen on the device, before the first step. Raises UserFault."""

    # ------------------------------------------------------------------------------------------------------- each task

    @abstractmethod
    def _encode(self, rows: Iterable[Row]) -> Iterator[E | None]:
        """An example for each row, None for one that is dropped. Raises DataError."""

    @abstractmethod
    def size(self, example: E) -> int:
        """What an example costs, in tokens."""

    @abstractmethod
    def targets(self, example: E) -> int:
        """How many losses an example has: the step's loss is their mean."""

    @abstractmethod
    def collate(self, examples: Sequence[E], device: torch.device) -> Batch:
        """One batch on the device."""

    @abstractmethod
    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """Sum of the batch's losses, float32, with its graph."""

    def choose(self, held: Sequence[E]) -> None:
        """Before held-out rows are judged: which of them to look at closer."""

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        """(sum of the losses, what `metrics` counts), both of held-out rows."""
        return self.loss_sum(model, batch), ()

    def metrics(self, judged: Sequence[Any]) -> Mapping[str, float]:
        """What people ask for beside the loss, of all held-out rows together."""
        return {}

    def micro_batches(self, examples: Sequence[E], count: int) -> list[list[E]]:
        """A step's examples, at most `count` in a forward pass."""
        return by_size(examples, count, self.size)

    def write(self, model: Any, device: torch.device) -> list[str]:
        """What the model makes of each of the configured prompts."""
        return []

    def save(self, folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
        """`adapter/` (peft's format) or `model/`, a whole folder. `state`: tensors in place of the model's own."""
        if isinstance(self.config.method, LoraConfig):
            models.save_adapter(folder / "adapter", model, state)
            return
        model.config.use_cache = True
        model.save_pretrained(folder / "model", state_dict=state)
        self.tokenizer.save_pretrained(folder / "model")

    def _tokenizer(self) -> Any:
        return models.tokenizer_of(self.config)

    def _head(self) -> dict[str, Any]:
        """More arguments for loading the model."""
        return {}

    def _settle(self, model: Any) -> None:
        """What of the model's config the task sets."""

    def _nothing(self) -> str:
        return f"data: no row has a target within max_length {self.config.max_length}; raise train.max_length"
