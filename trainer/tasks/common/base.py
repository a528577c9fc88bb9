"""The seam between the loop and what it trains."""

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
from trainer.models import loading as models
from trainer.models import max_positions as positions
from trainer.models import remote_code as trust

E = TypeVar("E")
_log = logging.getLogger(__name__)
NAMED = 20
LOOKED_AT = 100
"""Rows by which it is told whether a column is there; one that a single row lacks is that row's fault."""
Row = dict[str, Any]
"""Cells by column."""
Seen = Callable[[int, Row, Any], None]
"""Is told of every row that can be used: its number from 1, its cells, and what `Task.example` made of it."""
Batch = dict[str, torch.Tensor]


class Task(ABC, Generic[E]):
    """One kind of fine-tune; `E` is one of its examples."""

    architecture: str
    """The class of transformers that loads the model."""
    adapters: str | None
    """peft's `task_type`; None for a model that it has no kind for."""
    cuts = True
    """Whether `example` has cut what is longer than `limit`."""
    keeps_base_samples = True
    """Whether what the untuned model writes is small enough to lie in every checkpoint of a full fine-tune."""
    made: type[Any] | None = None
    """The dataclass that `example` makes, of numbers and texts alone; None: what it makes stays in memory."""
    looks_ahead = False
    """`ahead` makes something of the next step's rows."""
    headed = False
    """Modules whose weights no checkpoint gave are trained, and saved whole."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.pad = 0
        self._embedded: int | None = None
        """Tokens that the model has embeddings of, where the tokenizer makes others."""
        self._longest = 0
        """Tokens of the longest sequence of the rows that something is learned of."""
        self.where = source(config.data.path)
        """How messages name the data set."""
        self.rows = 0
        """Rows of the data set, those that cannot be used among them."""
        self.bad = 0
        """Rows that cannot be used."""
        self.faults: list[str] = []
        """What is wrong with the first NAMED of them, naming file and row."""

    def examples(
        self, path: Path, data_format: Any, seen: Seen | None = None, *, folder: Path | None = None, of: str = ""
    ) -> tuple[Sequence[E], int]:
        """(examples, how many rows were dropped since nothing is learned from them). Rows that cannot be used are left
        out and counted. Raises UserFault, and DataFault also for more of these than `data.bad_share`.

        `folder`: where what is made of the rows lies, or is put, for all processes of this machine; `of`: the
        hash of the data.
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
        """Which rows something is learned of. Raises UserFault for a token that the model has no embedding of: the
        tokenizer may have more of them, as long as no row does.
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
        """What `example` makes of each row that can be used; of texts it lies on the disk. Raises DataError."""
        if self.made is None:
            rows: list[Any] = []
            self._read(path, data_format, seen, rows.append)
            return rows
        if folder is None or not sha256:
            with tempfile.TemporaryDirectory(prefix="rows-") as temporary:  # what is mapped stays until it is let go
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
        """A hash of all that what is made of the rows depends on."""
        config = self.config
        parts = (
            kept.VERSION, sha256, data_format, config.task, config.max_length,
            config.data.model_dump_json(exclude={"path", "eval_share", "bad_share"}),
            models.told_apart(self.tokenizer),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _read(self, path: Path, data_format: Any, seen: Seen | None, keep: Callable[[Any], None]) -> None:
        """Keeps what `example` makes of each row that can be used. Raises DataError for what is wrong with all."""
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
        """Of one of several files: with the file's name."""
        place = f"{self.where} row {number}"
        if not isinstance(row, Placed) or not str(error).startswith(place):
            return error
        return DataError(row.place + str(error).removeprefix(place))

    def _prepare(self) -> None:
        """Before the rows are read. Raises UserFault."""
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
        """The model, with adapters where they are asked for; after `examples`. Raises UserFault.

        `hollow`: without its weights, which another process reads and hands out.
        """
        model, fresh = models.load(self.config, precision, self.architecture, hollow=hollow, **self._head())
        self._settle(model)
        return models.wrap(model, self.config, self.adapters, fresh if self.headed else ())

    def hollow(self) -> Any:
        """The model by its config alone, without weights, adapters and memory. Raises UserFault."""
        import transformers

        config = models.config_of(self.config)
        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        if models.brings(self.config, config, self.architecture):
            # else the code would be today's, not what was read
            options["code_revision"] = trust.loading(self.config)["revision"]
        try:
            with torch.device("meta"):
                return getattr(transformers, self.architecture).from_config(config, **options)
        except models.UNREAD as e:
            raise models.unloadable(self.config, e) from None

    def check_samples(self) -> None:
        """Whether `write` can take the configured prompts; after `examples`. Raises UserFault."""

    def check_targets(self, model: Any) -> None:
        """Whether a hollow model has what gets adapters. Raises UserFault."""
        if self.config.adapters is not None:
            models.chosen(model, self.config.adapters)

    def check(self, model: Any, device: torch.device) -> None:
        """What can only be seen on the device, before the first step. Raises UserFault."""

    # ------------------------------------------------------------------------------------------------------- each task

    @abstractmethod
    def example(self, row: Row, number: int) -> Any:
        """What a row becomes, as far as it can be told without the others. Raises DataError naming the row."""

    def _survey(self, found: Sequence[Any]) -> None:
        """Sees once what `example` made of all rows that can be used. Raises DataFault."""

    def _settled(self, found: Any) -> E:
        """The example, of what `example` made of a row, once all of them were seen."""
        return found  # type: ignore[no-any-return]

    def lengths(self, example: Any) -> tuple[int, ...]:
        """Tokens of each sequence of what `example` made that `max_length` bounds; none for what is no text."""
        return tuple(map(len, self.sequences(example)))

    def sequences(self, example: Any) -> tuple[Sequence[int], ...]:
        """Token ids of what `example` made, as the model's own embeddings are asked for them."""
        return (example.ids,)

    @property
    def limit(self) -> int:
        """Tokens of a sequence that are read; after `examples`."""
        return self.config.max_length

    @abstractmethod
    def shown(self, example: Any) -> tuple[str, str]:
        """(what the model is given, what it learns to say), as text, of what `example` made."""

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

    def begins(self, step: int) -> None:
        """Before the rows of a step are trained on; before held-out rows are judged, with a number that no step has."""

    def ahead(self, examples: Sequence[E]) -> None:
        """Before a step is trained, for a task that `looks_ahead`: this process's rows of the next one, which another
        thread may make ready meanwhile. What is trained does not depend on it.
        """

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

    def keep(self, folder: Path, samples: list[dict[str, str]]) -> list[dict[str, str]]:
        """What `samples.json` says of the samples; files beside it go to the folder."""
        return samples

    def save(self, folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
        """`adapter/` (peft's format, and the tokenizer) or `model/`, a whole folder. `state`: tensors in place of the
        model's own.
        """
        if self.config.adapters is not None:
            models.save_adapter(folder / "adapter", model, state)
            self.tokenizer.save_pretrained(folder / "adapter")
            return
        model.config.use_cache = True
        models.save_whole(folder / "model", model, state)
        self.tokenizer.save_pretrained(folder / "model")

    def merge(self, folder: Path) -> None:
        """`model/` of the `adapter/` beside it: merged into the weights as they were published, in host memory."""
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
        """More arguments for loading the model."""
        return {}

    def _settle(self, model: Any) -> None:
        """What of the model's config the task sets."""

    def _nothing(self) -> str:
        return f"data: no row has a target within max_length {self.config.max_length}; raise train.max_length"
