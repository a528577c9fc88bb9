"""Model of a task: loading, loss, metrics, saving, and merging of adapters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import adapters, loading, remote_code
from trainer.tasks.common.task_data import Batch, TaskData

MERGE_TOLERANCE = 0.05
"""Largest relative difference of the mean loss before and after a merge: 16-bit weights round by about a hundredth."""
D = TypeVar("D", bound=TaskData[Any])


class TaskModel(ABC, Generic[D]):
    """Builder, loss and writer of a task's model. `D` is the data whose batches the model reads.

    It does not own the module: each method gets the module, which may be wrapped for several processes.
    """

    architecture: str
    """Class of transformers that loads the model."""
    peft_type: str | None
    """Value of peft's `task_type`; None: peft has no type for this model."""
    headed = False
    """True if modules with new weights are trained and saved whole."""
    unfit_hint = "mend its config.json, or take another model"
    """Fix for a model that cannot take a row."""
    needs_weights = False
    """True if the batches are made with weights of the model, so that rows cannot be checked without them."""

    def __init__(self, config: TrainConfig, data: D) -> None:
        self.config, self._data = config, data

    # --------------------------------------------------------------------------------------------------------- building

    def check_kind(self) -> None:
        """Raise UserFault for a model that the task cannot train. Reads no rows and no weights."""
        loading.check_kind(self.config, self.architecture)

    def build(self, precision: str, *, hollow: bool = False) -> Any:
        """Return the model, with the configured adapters. Requires `TaskData.read` before. Raises UserFault.

        `precision`: bf16, fp16 or fp32. `hollow`: True loads no weights, because another process distributes them.
        """
        model, new_modules = loading.load(
            self.config, precision, self.architecture, hollow=hollow, **self._head_options()
        )
        self._configure(model)
        return adapters.wrap(model, self.config, self.peft_type, new_modules if self.headed else ())

    def build_hollow(self) -> Any:
        """Return the model on the meta device with its head, without weights and adapters. Raises UserFault.

        Requires `TaskData.read` before.
        """
        model = loading.hollow(self.config, self.architecture, **self._head_options())
        self._configure(model)
        return model

    def check_targets(self, model: Any) -> None:
        """Raise UserFault if a hollow model lacks the modules that get adapters, or cannot be merged as configured."""
        if self.config.quantised is not None:
            loading.check_quantisable(model)
        if self.config.adapters is not None:
            adapters.target_modules(model, self.config.adapters)
            if self.config.output.merge:
                adapters.check_mergeable(model, self.config.adapters)

    def check_on_device(self, model: Any, device: torch.device) -> None:
        """Check the model on the device before the first step. Raises UserFault."""

    def _head_options(self) -> dict[str, Any]:
        """Return arguments of `from_pretrained` for the model's head."""
        return {}

    def _configure(self, model: Any) -> None:
        """Change the loaded model's config for the task, and check the config. Raises UserFault."""

    # ------------------------------------------------------------------------------------------------- loss and metrics

    @abstractmethod
    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of the batch's losses: a float32 scalar with its graph.

        The sum has `TaskData.targets` losses for each example; the unit of one loss is in the class docstring.
        """

    def compared_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the sum by which `merge` compares models with and without an adapter, in the form of `loss_sum`."""
        return self.loss_sum(model, batch)

    def choose_judged(self, held_out: Sequence[Any]) -> None:
        """Choose the held-out examples for expensive metrics, before an evaluation."""

    def judge(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Sequence[Any]]:
        """Return the `loss_sum` of held-out examples, and what `metrics` needs of each example."""
        return self.loss_sum(model, batch), ()

    def metrics(self, judged: Sequence[Any]) -> Mapping[str, float]:
        """Return metrics by name over all held-out examples. `judged`: the results of `judge`, joined."""
        return {}

    # ----------------------------------------------------------------------------------------------------------- saving

    def save(self, folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write `adapter/` (peft's format) or `model/`, each with the tokenizer, to the folder.

        `state`: tensors to save instead of the model's weights.
        """
        if self.config.adapters is not None:
            adapters.save_adapter(folder / "adapter", model, state)
            self._save_tokenizer(folder / "adapter")
            return
        model.config.use_cache = True
        loading.save_whole(folder / "model", model, state)
        self._save_tokenizer(folder / "model")

    def _save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer as it was published; a head over texts needs a padding token, which it gets if needed."""
        tokenizer = self._data.tokenizer
        if self.headed and getattr(tokenizer, "pad_token", "") is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self._data.pad)
        loading.save_tokenizer(folder, tokenizer, self._data.encoding_state)

    def merge(self, folder: Path, rows: Sequence[Any] = ()) -> Mapping[str, float]:
        """Write `model/`: the folder's `adapter/` merged into the published weights, in host memory.

        Returns the mean losses of the rows before and after the merge; empty without rows. Raises UserFault if they
        differ by more than MERGE_TOLERANCE: then the merged model is not what was trained.
        """
        import peft
        import transformers

        base = getattr(transformers, self.architecture).from_pretrained(
            self.config.model,
            dtype="auto",
            use_safetensors=True,
            **remote_code.load_options(self.config),
            **self._head_options(),
        )
        self._configure(base)
        adapted = peft.PeftModel.from_pretrained(base, str(folder / "adapter"))
        adapters.untie_adapted_head(adapted)
        before = self._mean_loss(adapted, rows)
        merged = adapted.merge_and_unload()
        after = self._mean_loss(merged, rows)
        if not abs(after - before) <= MERGE_TOLERANCE * max(abs(before), 0.1):  # NaN is refused too.
            raise UserFault(
                f"output.merge: the merged model has the loss {after:.4f}, base and adapter have {before:.4f}; set "
                "output.merge: false and use the adapter, or choose other train.method.targets"
            )
        loading.save_whole(folder / "model", merged)
        self._save_tokenizer(folder / "model")
        return {"adapter_loss": before, "merged_loss": after} if rows else {}

    def _mean_loss(self, model: Any, rows: Sequence[Any]) -> float:
        """Return the mean loss of rows in host memory; 0 without rows."""
        if not rows:
            return 0.0
        model.eval()
        with torch.no_grad():
            loss = self.compared_sum(model, self._data.collate(rows, torch.device("cpu")))
        return float(loss) / max(1, sum(map(self._data.targets, rows)))
