"""Base class of all tasks: the interface between the training loop and a kind of fine-tune."""

import hashlib
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from trainer.batching import mmap_dataset as kept
from trainer.batching.examples import by_size
from trainer.batching.mmap_dataset import Subset
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault, UserFault
from trainer.core.ipc import rows_note
from trainer.dataset.prompts import DataError, check_columns, digest, source, too_many
from trainer.dataset.readers import Placed, each_row
from trainer.models import adapters as model_adapters
from trainer.models import loading as models
from trainer.models import max_positions as positions
from trainer.models import remote_code as trust

E = TypeVar("E")
_log = logging.getLogger(__name__)
NAMED = 20
LOOKED_AT = 100
"""Rows that are checked for the configured columns. A column missing in single rows is an error of those rows."""
Row = dict[str, Any]
"""Cells by column."""
Seen = Callable[[int, Row, Any], None]
"""Callback for each usable row: its number from 1, its cells, and the result of `Task.example`."""
Batch = dict[str, torch.Tensor]


class Task(ABC, Generic[E]):
    """One kind of fine-tune; `E` is one of its examples."""

    architecture: str
    """Class of transformers that loads the model."""
    adapters: str | None
    """Value of peft's `task_type`; None: peft has no type for this model."""
    cuts = True
    """True if `example` cuts sequences to `limit`."""
    keeps_base_samples = True
    """True if the untuned model's samples are small enough for every checkpoint of a full fine-tune."""
    made: type[Any] | None = None
    """Dataclass that `example` returns, of numbers and texts alone; None: the results stay in memory."""
    looks_ahead = False
    """True if `ahead` prepares the next step's rows."""
    headed = False
    """True if modules with new weights are trained and saved whole."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.pad = 0
        self._embedded: int | None = None
        """Number of the model's embeddings if the tokenizer has higher ids, otherwise None."""
        self._longest = 0
        """Tokens of the longest sequence in rows with a target."""
        self.where = source(config.data.path)
        """Name of the data set in messages."""
        self.rows = 0
        """Number of rows of the data set, bad rows included."""
        self.bad = 0
        """Number of bad rows, which cannot be used."""
        self.faults: list[str] = []
        """Errors of the first NAMED bad rows, with file and row."""

    def examples(
        self, path: Path, data_format: Any, seen: Seen | None = None, *, folder: Path | None = None, of: str = ""
    ) -> tuple[Sequence[E], int]:
        """Return the examples and the number of rows without a target. Bad rows are left out and counted.

        `folder`: folder of the token cache for all processes of this machine; `of`: hash of the data.
        Raises UserFault, and DataFault, also for a larger share of bad rows than `data.bad_share`.
        """
        self._prepare()
        try:
            found = self._rows_of(path, data_format, seen, folder, of)
        except DataError as e:
            raise DataFault(str(e)) from None
        if not self.rows:
            raise DataFault(f"{self.where}: has a header or an empty list but no row; give at least one row")
        if self.bad and (wrong := too_many(self.bad, self.rows, self.config.data.bad_share, self.faults[0])):
            raise DataFault(wrong)
        if self.bad and os.environ.get("RANK", "0") == "0":
            _log.warning("%d of %d rows are bad and left out; the first: %s", self.bad, self.rows, self.faults[0])
        self._survey(found)
        examples = Subset(found, self._learned(found), self._settled)
        if not len(examples):
            raise DataFault(self._nothing())
        if self.cuts:
            positions.insist(self.config, self._longest)
        self.check_samples()
        return examples, len(found) - len(examples)

    def _learned(self, found: Sequence[Any]) -> Iterator[int]:
        """Yield the numbers of the rows with a target.

        Raises UserFault for a row with a token that the model has no embedding for; unused tokens are allowed.
        """
        for number, e in enumerate(found):
            if self._embedded is not None:
                self._insist_on_embeddings(e, self._embedded)
            if self.targets(self._settled(e)) > 0:
                self._longest = max(self._longest, 0, *self.lengths(e))
                yield number

    def _insist_on_embeddings(self, example: Any, count: int) -> None:
        most = max((max(ids) for ids in self.sequences(example) if ids), default=0)
        if most >= count:
            raise UserFault(
                f"train.model: the rows have token {most} ({self.tokenizer.convert_ids_to_tokens(most)!r}), and "
                f"{self.config.model!r} has {count} embeddings; resize them to the tokenizer, or take the model's own"
            )

    def _rows_of(
        self, path: Path, data_format: Any, seen: Seen | None, folder: Path | None, sha256: str
    ) -> Sequence[Any]:
        """Return the result of `example` for each usable row; those of a dataclass are on disk. Raises DataError."""
        if self.made is None:
            rows: list[Any] = []
            self._read(path, data_format, seen, rows.append)
            return rows
        if folder is None or not sha256:
            with tempfile.TemporaryDirectory(prefix="rows-") as temporary:  # A mapped file outlives its deletion.
                return self._on_disk(path, data_format, seen, Path(temporary), sha256)
        with kept.folder_lock(folder):
            return self._on_disk(path, data_format, seen, folder, sha256)

    def _on_disk(self, path: Path, data_format: Any, seen: Seen | None, folder: Path, sha256: str) -> Sequence[Any]:
        assert self.made is not None
        identity = self._identity(data_format, sha256)
        known = rows_note(folder) if sha256 and seen is None else None
        if known is None or known["identity"] != identity:
            writer = kept.DatasetWriter(folder, self.made)
            self._read(path, data_format, seen, writer.append)
            if sha256 and digest(path) != sha256:
                raise DataError(f"{self.where}: its file {path.name} has changed since it was hashed; start again")
            writer.close({"identity": identity, "rows": self.rows, "bad": self.bad, "faults": self.faults})
        else:
            self.rows, self.bad, self.faults = known["rows"], known["bad"], known["faults"]
        return kept.MmapDataset(folder, self.made)

    def _identity(self, data_format: Any, sha256: str) -> str:
        """Return a hash of all inputs that change the tokenised rows."""
        config = self.config
        parts = (
            kept.VERSION, sha256, data_format, config.task, config.max_length,
            config.data.model_dump_json(exclude={"path", "eval_share", "bad_share"}),
            models.told_apart(self.tokenizer),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _read(self, path: Path, data_format: Any, seen: Seen | None, keep: Callable[[Any], None]) -> None:
        """Pass the result of `example` for each usable row to `keep`. Raises DataError for errors of all rows."""
        self.rows, self.bad, self.faults = 0, 0, []
        columns: dict[str, Any] = {}
        for number, row in enumerate(each_row(path, data_format, self.where), 1):
            self.rows = number
            if isinstance(row, DataError):
                self._leave_out(row)
                continue
            if number <= LOOKED_AT:
                columns.update(row)
            if number == LOOKED_AT:
                check_columns(self.config.data, columns)
            try:
                example = self.example(row, number)
            except DataError as e:
                self._leave_out(self._placed(e, row, number))
                continue
            keep(example)
            if seen is not None:
                seen(number, row, example)
        if columns and self.rows < LOOKED_AT:
            check_columns(self.config.data, columns)

    def _placed(self, error: DataError, row: Row, number: int) -> DataError:
        """Return the error of a row; a row of one of several files gets the file's name."""
        place = f"{self.where} row {number}"
        if not isinstance(row, Placed) or not str(error).startswith(place):
            return error
        return DataError(row.place + str(error).removeprefix(place))

    def _prepare(self) -> None:
        """Check the model's kind and load the tokenizer, before the rows are read. Raises UserFault."""
        models.check_kind(self.config, self.architecture)
        self.tokenizer = self._tokenizer()
        count = models.embeddings(self.config)
        self._embedded = count if count is not None and models.largest(self.tokenizer) >= count else None
        marks = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        self.pad = next((t for t in marks if t is not None and (self._embedded is None or t < self._embedded)), 0)

    def _leave_out(self, error: DataError) -> None:
        self.bad += 1
        if self.bad <= NAMED:
            self.faults.append(str(error))

    def model(self, precision: str, *, hollow: bool = False) -> Any:
        """Return the model, with the configured adapters. Requires `examples` before. Raises UserFault.

        `hollow`: True loads no weights, because another process reads and distributes them.
        """
        model, fresh = models.load(self.config, precision, self.architecture, hollow=hollow, **self._head())
        self._settle(model)
        return model_adapters.wrap(model, self.config, self.adapters, fresh if self.headed else ())

    def hollow(self) -> Any:
        """Return the model on the meta device, without weights and adapters. Raises UserFault."""
        import transformers

        config = models.config_of(self.config)
        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        if models.brings(self.config, config, self.architecture):
            # Without it the current code would be loaded, not the revision that the user read.
            options["code_revision"] = trust.loading(self.config)["revision"]
        try:
            with torch.device("meta"):
                return getattr(transformers, self.architecture).from_config(config, **options)
        except models.UNREAD as e:
            raise models.unloadable(self.config, e) from None

    def check_samples(self) -> None:
        """Raise UserFault if `write` cannot use the configured prompts. Requires `examples` before."""

    def check_targets(self, model: Any) -> None:
        """Raise UserFault if a hollow model lacks the modules that get adapters."""
        if self.config.adapters is not None:
            model_adapters.target_modules(model, self.config.adapters)

    def check(self, model: Any, device: torch.device) -> None:
        """Check the model on the device before the first step. Raises UserFault."""

    # ------------------------------------------------------------------------------------------------------- each task

    @abstractmethod
    def example(self, row: Row, number: int) -> Any:
        """Return the example of a row as far as it does not depend on other rows. Raises DataError with the row."""

    def _survey(self, found: Sequence[Any]) -> None:
        """Read the results of `example` for all usable rows once. Raises DataFault."""

    def _settled(self, found: Any) -> E:
        """Return the final example of a result of `example`, after `_survey`."""
        return found  # type: ignore[no-any-return]

    def lengths(self, example: Any) -> tuple[int, ...]:
        """Return the number of tokens of each sequence that `max_length` limits; empty for an example without text."""
        return tuple(map(len, self.sequences(example)))

    def sequences(self, example: Any) -> tuple[Sequence[int], ...]:
        """Return the token ids of an example that index the model's embeddings."""
        return (example.ids,)

    @property
    def limit(self) -> int:
        """Largest number of tokens of a sequence. Requires `examples` before."""
        return self.config.max_length

    @abstractmethod
    def shown(self, example: Any) -> tuple[str, str]:
        """Return the model's input and target of an example, as text."""

    @abstractmethod
    def size(self, example: E) -> int:
        """Return the cost of an example in tokens."""

    @abstractmethod
    def targets(self, example: E) -> int:
        """Return the number of losses of an example; the step's loss is their mean."""

    @abstractmethod
    def collate(self, examples: Sequence[E], device: torch.device) -> Batch:
        """Return one batch on the device."""

    @abstractmethod
    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the batch's losses, float32, with its graph."""

    def begins(self, step: int) -> None:
        """Prepare for a step, or for an evaluation, whose `step` is a number that no step has."""

    def ahead(self, examples: Sequence[E]) -> None:
        """Prepare this process's rows of the next step in other threads, for a task that `looks_ahead`.

        The loop calls it before it trains a step. The results do not depend on it.
        """

    def choose(self, held: Sequence[E]) -> None:
        """Choose the held-out rows for expensive metrics, before an evaluation."""

    def judged(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        """Return the sum of the losses of held-out rows, and the inputs of `metrics`."""
        return self.loss_sum(model, batch), ()

    def metrics(self, judged: Sequence[Any]) -> Mapping[str, float]:
        """Return further metrics of all held-out rows together."""
        return {}

    def micro_batches(self, examples: Sequence[E], count: int) -> list[list[E]]:
        """Split a step's examples into forward passes of at most `count` examples."""
        return by_size(examples, count, self.size)

    def write(self, model: Any, device: torch.device) -> list[str]:
        """Return the model's output for each configured prompt."""
        return []

    def keep(self, folder: Path, samples: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the content of `samples.json`, and write further files of the samples to the folder."""
        return samples

    def save(self, folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write `adapter/` (peft's format) or `model/`, each with the tokenizer, to the folder.

        `state`: tensors to save instead of the model's weights.
        """
        if self.config.adapters is not None:
            model_adapters.save_adapter(folder / "adapter", model, state)
            self.tokenizer.save_pretrained(folder / "adapter")
            return
        model.config.use_cache = True
        models.save_whole(folder / "model", model, state)
        self.tokenizer.save_pretrained(folder / "model")

    def merge(self, folder: Path) -> None:
        """Write `model/`: the folder's `adapter/` merged into the published weights, in host memory."""
        import peft
        import transformers

        base = getattr(transformers, self.architecture).from_pretrained(
            self.config.model, dtype="auto", use_safetensors=True, **trust.loading(self.config), **self._head()
        )
        self._settle(base)
        merged = peft.PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
        models.save_whole(folder / "model", merged)
        self.tokenizer.save_pretrained(folder / "model")

    def _tokenizer(self) -> Any:
        return models.tokenizer_of(self.config)

    def _head(self) -> dict[str, Any]:
        """Return further arguments for loading the model."""
        return {}

    def _settle(self, model: Any) -> None:
        """Change the model's config for the task."""

    def _nothing(self) -> str:
        return f"data: no row has a target within max_length {self.config.max_length}; raise train.max_length"
