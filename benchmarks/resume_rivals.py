"""The same kills for what others resume with: HF Trainer's `resume_from_checkpoint=True`, and accelerate's `save_state`
and `load_state` as its checkpointing example and guide use them.

Both train a tiny Llama with dropout, with accumulation, and save every second step, keeping two. Their programs are
killed at any time, and every second time within a save. Each is held against its own undisturbed run.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.trainer.support import tiny_models as heads
from tests.trainer.support.kill_schedules import KILLS, TRIES
from tests.trainer.support.workers import FORKS

Rival = Literal["hf_trainer", "accelerate", "accelerate_seedable"]
"""The last with its `use_seedable_sampler`, which is off by default."""
ROWS, LENGTH = 36, 16
MICRO, ACCUMULATION = 3, 4
STEPS, SAVE_EVERY, KEEP = 14, 2, 2
SEED = 17
RATE = 1e-2
SAVES = 2
"""A life is killed in one of its first so many saves, where it is killed in a save."""
REFUSED = 3
"""Exit code: there were checkpoints, and none was loaded."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Seconds after the start of the life, or of its `save`th save."""

    after_s: float
    save: int | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order for one life of a program."""

    rival: Rival
    model: Path
    output: Path
    kill: Kill | None = None

    @property
    def result(self) -> Path:
        """Return the file that an undisturbed run writes at its end."""
        return self.output / "result.json"


@dataclass(kw_only=True)
class RivalCounts:
    """Results of a rival's schedules."""

    schedules: int = 0
    exact: int = 0
    kills: int = 0
    unloadable: int = 0
    """Kills after which its own resume failed."""


class Watch:
    """Callback that kills its process at the scheduled time and measures saves."""

    def __init__(self, kill: Kill | None) -> None:
        self._kill, self._count = kill, 0
        self.saves_s: list[float] = []
        if kill is not None and kill.save is None:
            self._arm(kill.after_s)

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._count += 1
        if self._kill is not None and self._kill.save == self._count:
            self._arm(self._kill.after_s)
        started = time.monotonic()
        yield
        self.saves_s.append(time.monotonic() - started)

    def _arm(self, after_s: float) -> None:
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


# ------------------------------------------------------------------------------------------------------------- programs


def live(order: Order) -> None:
    """Run one life of a rival's program in a process of its own."""
    import torch

    log = os.open(order.output / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    watch = Watch(order.kill)
    try:
        rows, model = PROGRAMS[order.rival](order, watch)
    except Refused:
        traceback.print_exc()
        os._exit(REFUSED)
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode() + tensor.contiguous().numpy().tobytes())
    told = {"rows": rows, "weights": weights.hexdigest(), "save_s": sum(watch.saves_s) / max(1, len(watch.saves_s))}
    order.result.write_text(json.dumps(told))


class Refused(Exception):
    """Error: a checkpoint exists, and the rival's own way to load it fails."""


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.2, dtype=torch.float32)


def _rows() -> list[dict[str, Any]]:
    import torch

    ids = [torch.tensor([3 + (i * 7 + j * j) % 90 for j in range(LENGTH)]) for i in range(ROWS)]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def hf_trainer(order: Order, watch: Watch) -> tuple[list[Any], Any]:
    """(step, loss, norm, rate) of each step, and the model."""
    from transformers import Trainer, TrainingArguments, default_data_collator, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    begun = threading.Event()

    class Watched(Trainer):
        def _save_checkpoint(self, *arguments: Any, **more: Any) -> None:
            with watch.saving():
                super()._save_checkpoint(*arguments, **more)

        def training_step(self, *arguments: Any, **more: Any) -> Any:
            begun.set()
            return super().training_step(*arguments, **more)

    set_seed(SEED)
    out = order.output / "out"
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=MICRO, logging_steps=1, max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATION, save_steps=SAVE_EVERY, save_total_limit=KEEP, learning_rate=RATE,
        seed=SEED, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Watched(_model(order.model), arguments, train_dataset=_rows(), data_collator=default_data_collator)
    resume = out.is_dir() and get_last_checkpoint(str(out)) is not None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as e:
        if resume and not begun.is_set():
            raise Refused from e
        raise
    rows = [
        [r["step"], r["loss"], r["grad_norm"], r["learning_rate"]] for r in trainer.state.log_history if "loss" in r
    ]
    return rows, trainer.model


def accelerate(order: Order, watch: Watch) -> tuple[list[Any], Any]:
    """(step, loss) of each step, and the model."""
    import torch
    from accelerate.utils import set_seed
    from transformers import get_linear_schedule_with_warmup

    set_seed(SEED)
    accelerator = _accelerator(order)
    bare = _model(order.model)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=RATE)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    loader = torch.utils.data.DataLoader(_rows(), batch_size=MICRO, shuffle=True)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader, schedule = accelerator.prepare(bare, optimizer, loader, schedule)
    step = _loaded(accelerator, order.output / "checkpoints")
    epoch, skip = divmod(step * ACCUMULATION, len(loader))
    losses: list[float] = []
    while step < STEPS:
        model.train()
        for batch in accelerator.skip_first_batches(loader, skip) if skip else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if not accelerator.sync_gradients:
                continue
            step += 1
            _note(order.output, step, losses)
            losses = []
            if step % SAVE_EVERY == 0:
                with watch.saving():
                    accelerator.save_state()
            if step == STEPS:
                break
        epoch, skip = epoch + 1, 0
    return _noted(order.output), bare


def _accelerator(order: Order) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    project = ProjectConfiguration(str(order.output), automatic_checkpoint_naming=True, total_limit=KEEP)
    seedable = DataLoaderConfiguration(use_seedable_sampler=order.rival == "accelerate_seedable")
    return Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATION, project_config=project, dataloader_config=seedable
    )


def _note(output: Path, step: int, losses: list[float]) -> None:
    with (output / "losses.jsonl").open("a") as file:
        file.write(json.dumps([step, losses]) + "\n")


def _noted(output: Path) -> list[Any]:
    """Return the last note of each step."""
    told = map(json.loads, (output / "losses.jsonl").read_text().splitlines())
    return sorted({row[0]: row for row in told}.values())


def _loaded(accelerator: Any, folder: Path) -> int:
    """Return the step of the newest checkpoint, which is loaded; the names continue from there, as in the guide."""
    numbers = [int(path.name.rsplit("_", 1)[1]) for path in folder.glob("checkpoint_*")]
    if not numbers:
        return 0
    try:
        accelerator.load_state()
    except Exception as e:
        raise Refused from e
    accelerator.project_configuration.iteration = max(numbers) + 1
    return (max(numbers) + 1) * SAVE_EVERY


PROGRAMS: dict[Rival, Callable[[Order, Watch], tuple[list[Any], Any]]] = {
    "hf_trainer": hf_trainer, "accelerate": accelerate, "accelerate_seedable": accelerate,
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ schedules


@dataclass(kw_only=True)
class Schedules:
    """Schedules of one rival."""

    rival: Rival
    folder: Path
    found: RivalCounts = field(default_factory=RivalCounts)

    def __post_init__(self) -> None:
        self._model = heads.llama(self.folder / "model")
        self._undisturbed: dict[str, Any] = {}
        self._lasts_s = self._save_s = 0.0

    def measure(self) -> None:
        """Run undisturbed twice; both runs must be equal before any other run is compared."""
        runs = []
        for number in range(2):
            started = time.monotonic()
            assert self._live(self.folder / f"calm{number}", None) == 0, self.rival
            self._lasts_s = time.monotonic() - started
            runs.append(json.loads((self.folder / f"calm{number}" / "result.json").read_text()))
        self._save_s = runs[1]["save_s"]
        assert _same(*runs), f"{self.rival} differs from itself"
        self._undisturbed = runs[0]

    def carry_out(self, number: int, seed: int) -> None:
        """Run one schedule of one to four kills; a run that does not come to its end is not exact."""
        draw, self.found.schedules = random.Random(f"{self.rival}/{seed}/{number}"), self.found.schedules + 1
        kills, done = draw.randint(1, KILLS), 0
        output = self.folder / f"schedule{number}"
        for _ in range(TRIES):
            code = self._live(output, self._drawn(draw) if done < kills else None)
            if code == -signal.SIGKILL:
                done += 1
                self.found.kills += 1
                continue
            if code == 0 and not done:
                shutil.rmtree(output)
                continue
            self.found.unloadable += code == REFUSED
            if code == 0:
                self.found.exact += _same(json.loads((output / "result.json").read_text()), self._undisturbed)
            break
        shutil.rmtree(output, ignore_errors=True)

    def _drawn(self, draw: random.Random) -> Kill:
        if draw.random() < 1 / 2:
            return Kill(after_s=draw.uniform(0, self._lasts_s))
        return Kill(after_s=draw.uniform(0, self._save_s), save=draw.randint(1, SAVES))

    def _live(self, output: Path, kill: Kill | None) -> int:
        output.mkdir(exist_ok=True)
        order = Order(rival=self.rival, model=self._model, output=output, kill=kill)
        process = FORKS.Process(target=live, args=(order,))
        process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[what] == other[what] for what in ("rows", "weights"))
