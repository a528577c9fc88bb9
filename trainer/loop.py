"""The training loop: from a job to a tuned model, resumable at every micro-batch, bit by bit."""

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed

from trainer import (
    card,
    devices,
    evaluate,
    guard,
    kept,
    model,
    optimizers,
    order,
    parallel,
    results,
    schedule,
    selection,
    switches,
    tasks,
)
from trainer.checkpoint_plan import METRICS, Progress
from trainer.faults import Drained, UserFault
from trainer.ipc import RunFolder, WorkerJob
from trainer.keeper import Keeper
from trainer.report import Reporter

RATE_STEPS = 20
EVALUATION = 2**31
"""In place of a step's number, where evaluations draw at random: each draws the same."""


class Loop:
    """One fine-tune on this process's device, in step with the other processes."""

    def __init__(self, job: WorkerJob, run: RunFolder) -> None:
        self._job, self._run, self._config = job, run, job.train
        config = job.train
        cpu = not torch.cuda.is_available()
        parallel.join(job.parallelism, cpu=cpu)
        self._device = accelerate.PartialState(cpu=cpu).device
        self._precision = model.precision_of(config, self._device)
        mixed = "no" if self._precision == "fp32" else self._precision
        self._accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision=mixed)
        self._parallel = parallel.of(job.parallelism, self._accelerator, self._precision)
        self._parallel.takes(config)
        self._world, self._rank = self._parallel.world, self._parallel.rank
        self._report = Reporter(run, self._accelerator)
        self._report.say(devices.check(self._device))
        self._report.set(0, phase="loading", message=f"loading {config.model}")
        set_seed(config.seed)
        self._task = tasks.of(config)
        examples, dropped = self._task.examples(Path(job.data), job.data_format, folder=run.root, of=job.data_sha256)
        self._train, self._held = kept.divided(examples, config.seed, config.data.eval_share)
        self._total = schedule.total_steps(config, len(self._train))
        self._micro = min(config.rows_at_once, math.ceil(config.global_batch / self._world))
        self._bare = self._parallel.build(lambda hollow: self._task.model(self._precision, hollow=hollow))
        self._parameters = model.trainable(self._bare)
        optimizer = optimizers.of(self._parameters, config.optim, divided=self._parallel.divided)
        if config.tf32:
            switches.tf32(self._device)
        if config.compile:
            switches.compiled(parallel.layers(self._bare), self._device)
        with self._as_trained():
            self._task.check(self._bare, self._device)
        self._model, self._optimizer = self._parallel.prepare(self._bare, optimizer)
        self._selection = selection.Selection(config.selection)
        self._keeper = Keeper(
            job,
            run,
            accelerator=self._accelerator,
            arrangement=self._parallel,
            model=self._bare,
            parameters=self._parameters,
            optimizer=self._optimizer,
            selection=self._selection,
            report=self._report,
        )
        self._progress = Progress()
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RATE_STEPS)
        self._report_start(dropped)

    def _report_start(self, dropped: int) -> None:
        count = sum(p.numel() for p in self._parameters.values())
        self._report.say(
            f"{self._config.model}: {count:,} of {sum(map(model.size, self._bare.parameters())):,} weights are "
            f"trained, {self._precision} on {self._parallel.told()}; {len(self._train)} rows, "
            f"{len(self._held)} held out, {self._total} steps of {self._config.global_batch}"
        )
        if dropped:
            self._report.say(f"{dropped} rows dropped: no target within max_length {self._config.max_length}")

    def run(self) -> None:
        """Trains to the end and leaves the complete snapshot. Raises Drained, after saving, when asked to stop."""
        self._restore()
        self._keeper.start()
        try:
            self._before()
            self._bare.train()
            begun = self._progress.step
            while self._goes_on():
                self._step()
                if self._job.probe and self._progress.step == begun + 1:
                    self._probe()
                self._after_step()
            self._finish()
        except Drained:
            if self._progress.step or self._progress.micro:
                self._set(phase="draining", message="saving before the end")
                self._keeper.save(self._progress)
                self._keeper.snapshots.join()
                self._keeper.told_of_a_failure()
            raise
        except guard.GoBack:
            self._keeper.snapshots.join()
            raise

    def _goes_on(self) -> bool:
        """Evaluates before the next step, not after the last one: a run that was stopped between them does as well."""
        if self._progress.step >= self._total:
            return False
        self._evaluate_if_due()
        if why := selection.enough(self._config.selection, self._progress.scores):
            self._report.event("early_stop", why)
        return not why

    def _before(self) -> None:
        """What is measured before the first step, once in the life of a job."""
        if self._progress.step or self._progress.micro:
            return
        if self._held:
            loss, metrics = self._evaluate()
            self._progress = self._progress.model_copy(
                update={"heldout_loss_before": loss, "metrics_before": dict(metrics)}
            )
            self._set(heldout_loss_before=loss)
        if self._config.samples.prompts and self._config.adapters is None:
            kept = self._task.keeps_base_samples
            written = self._written() if kept else [""] * len(self._config.samples.prompts)
            self._progress = self._progress.model_copy(update={"base_samples": tuple(written)})

    def _batches(self) -> tuple[list[list[Any]], int]:
        """This process's micro-batches of the next step, and how many losses the whole step has.

        Where they do not divide evenly, a process takes an empty turn, so that all enter the same collectives.
        """
        config = self._config
        rows = order.window(config.seed, self._progress.samples, config.global_batch, len(self._train))
        micros = self._task.micro_batches([self._train[i] for i in rows], self._micro)
        targets = sum(self._task.targets(e) for micro in micros for e in micro)
        micros += [[] for _ in range(-len(micros) % self._world)]
        return micros[self._rank :: self._world], targets

    def _step(self) -> None:
        """One optimizer step; after a mid-step restore, what is left of it."""
        started = time.monotonic()
        self._jump()
        self._task.begins(self._progress.step)
        batches, targets = self._batches()
        loss = torch.tensor(self._progress.micro_loss, dtype=torch.float64, device=self._device)
        for number in range(self._progress.micro, len(batches)):
            last = number == len(batches) - 1
            set_seed(order.noise(self._config.seed, self._progress.step, number * self._world + self._rank))
            with contextlib.nullcontext() if last else self._parallel.collecting(self._model):
                part = self._forward(batches[number])
                self._accelerator.backward(part * (self._world / targets))
            loss += part.detach()
            if not last and self._world == 1 and self._run.drain.exists():
                halfway = {"micro": number + 1, "micro_rows": self._micro, "micro_loss": float(loss)}
                self._progress = self._progress.model_copy(update=halfway)
                raise Drained
        norm = self._clip()
        if self._world > 1:
            loss = self._accelerator.reduce(loss, reduction="sum")
        rate = schedule.learning_rate(self._config.optim, self._progress.step, self._total)
        row = {"loss": float(loss) / targets, "lr": rate, "grad_norm": norm}
        if self._is_good(row):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._keeper.snapshots.before_update()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        tokens = sum(self._task.size(e) for b in batches for e in b) * self._world
        self._record(row, tokens, time.monotonic() - started)

    def _jump(self) -> None:
        """Passes the rows that an earlier worker went wrong with."""
        before = self._progress
        self._progress = guard.jumped(before, self._job.jumps)
        if self._progress.samples != before.samples:
            self._optimizer.zero_grad(set_to_none=True)
            left = self._progress.samples - before.samples
            self._report.event(
                "left_out", f"after step {before.step}: {left} rows are left out, and the data goes on behind"
            )

    def _is_good(self, row: dict[str, float]) -> bool:
        """Whether the weights may be updated by this step. Raises GoBack, UserFault."""
        scaled = self._accelerator.scaler is not None and math.isfinite(row["loss"])
        norm = 0.0 if scaled and not math.isfinite(row["grad_norm"]) else row["grad_norm"]  # the scaler's own business
        verdict, care, told = guard.judge(self._config.guard, self._progress, row["loss"], norm)
        if verdict == "back":
            jumps = guard.back(self._config.guard, self._progress, self._config.global_batch)
        self._progress = self._progress.model_copy(update={"care": care})
        if told:
            self._report.event(
                {"go": "spike", "skip": "skipped", "back": "rolled_back", "stop": "diverged"}[verdict], told
            )
        if verdict == "back":
            raise guard.GoBack(jumps)
        if verdict == "stop":
            raise UserFault(told)
        return verdict == "go"

    def _clip(self) -> float:
        """Scales the gradients down where their norm is above the limit; their norm before that."""
        limit = self._config.optim.clip_norm
        return parallel.number(self._accelerator.clip_grad_norm_(self._parameters.values(), limit))

    def _probe(self) -> None:
        """The longest rows forward and back, when the optimizer has all that it keeps: memory that does not suffice
        for them shows now, not in an hour. Nothing is learned of them."""
        longest = kept.largest(self._train, self._micro, self._task.size)
        before = {name: buffer.clone() for name, buffer in self._bare.named_buffers()}
        targets = max(1, sum(self._task.targets(e) for e in longest))
        self._accelerator.backward(self._forward(longest) / targets)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self._bare.named_buffers():
                buffer.copy_(before[name])
        self._report.say(f"probe: {len(longest)} rows of up to {self._task.size(longest[0])} tokens fit")

    def _forward(self, batch: list[Any]) -> torch.Tensor:
        if batch:
            return self._task.loss_sum(self._model, self._task.collate(batch, self._device))
        return self._task.loss_sum(self._model, self._task.collate(self._train[:1], self._device)) * 0.0

    def _record(self, row: dict[str, float], tokens: int, seconds: float) -> None:
        step = self._progress.step + 1
        samples = self._progress.samples + self._config.global_batch
        self._progress = self._progress.model_copy(
            update={"step": step, "samples": samples, "micro": 0, "micro_loss": 0.0}
        )
        self._recent.append((seconds, tokens, self._config.global_batch))
        spent = sum(s for s, _, _ in self._recent)
        if self._accelerator.is_main_process:
            whole = {"step": step, **row, "tokens": tokens, "seconds": round(seconds, 4), "attempt": self._job.number}
            self._keeper.journal.add(whole)
        self._set(
            phase="training",
            message="",
            loss=row["loss"] if math.isfinite(row["loss"]) else self._report.status.loss,
            tokens_per_s=sum(t for _, t, _ in self._recent) / spent,
            rows_per_s=sum(r for _, _, r in self._recent) / spent,
        )
        self._report.say(
            f"step {step}/{self._total}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{self._report.status.tokens_per_s:.0f} tokens/s  {seconds:.2f} s"
        )

    def _after_step(self) -> None:
        step = self._progress.step
        self._keeper.snapshots.check()
        self._report.flush()
        due = self._keeper.is_due()
        drain, save = self._agree(self._run.drain.exists(), due and self._accelerator.is_main_process)
        if drain:
            raise Drained
        if save and step < self._total:
            self._keeper.save(self._progress)

    def _evaluate_if_due(self) -> None:
        step, every = self._progress.step, self._config.eval_every_steps
        if every and self._held and step and step % every == 0 and all(at != step for at, _ in self._progress.heldout):
            self._evaluate()

    def _agree(self, *facts: bool) -> tuple[bool, ...]:
        """True for all where it is for one, so that all leave the loop and save at the same step."""
        if self._world == 1:
            return facts
        flags = self._accelerator.reduce(torch.tensor([int(f) for f in facts], device=self._device), reduction="sum")
        return tuple(bool(f) for f in flags.tolist())

    def _judged(self) -> tuple[float, Mapping[str, float]]:
        """(loss, metrics) of the weights as they are."""
        self._set(phase="evaluating", message=f"loss on {len(self._held)} held-out rows")

        def between() -> None:
            if self._world == 1 and self._run.drain.exists():
                raise Drained

        self._task.begins(EVALUATION)
        set_seed(order.noise(self._config.seed, EVALUATION, 0))
        return evaluate.heldout(
            self._task, self._bare, self._held, size=self._micro * 2, device=self._device, between=between
        )

    def _evaluate(self) -> tuple[float, Mapping[str, float]]:
        loss, metrics = self._judged()
        selection.value(self._config.selection, loss, metrics)
        if self._progress.step:
            self._progress = self._selection.scored(self._progress, loss, metrics, self._parameters)
        heldout = (*(h for h in self._progress.heldout if h[0] != self._progress.step), (self._progress.step, loss))
        self._progress = self._progress.model_copy(update={"heldout": heldout})
        self._set(heldout_loss=loss)
        told = "".join(f", {name} {value:.4f}" for name, value in metrics.items())
        self._report.say(f"held-out loss after {self._progress.step} steps: {loss:.4f}{told}")
        return loss, metrics

    def _finish(self) -> None:
        after, metrics = self._evaluate() if self._held else (None, {})
        folder = self._run.root / "artifacts"
        settle = functools.partial(self._parallel.settle, self._bare)
        with self._selection.chosen(self._progress, settle, self._parameters) as at:
            if at is not None:
                self._report.event("best", f"the result has the weights of step {at}, which were judged best")
                after, metrics = self._judged()
            self._write(folder, after, metrics)
        self._insist(lambda: self._keeper.finish(self._progress, folder))

    def _write(self, folder: Path, after: float | None, metrics: Mapping[str, float]) -> None:
        """The results of the weights as they are, into a folder; entered by all. Raises Fault."""
        self._set(phase="sampling", message="writing samples", heldout_loss_after=after)
        samples = self._samples()
        scores: dict[str, Any] = {
            "heldout_loss_before": self._progress.heldout_loss_before,
            "heldout_loss_after": after,
            "rows": len(self._held),
            "history": [{"step": s, "loss": x} for s, x in self._progress.heldout],
        }
        if metrics:
            scores |= {"metrics_before": self._progress.metrics_before, "metrics_after": dict(metrics)}
        self._set(phase="saving", message="saving the results")
        lora = self._config.adapters is not None
        whole = self._parallel.whole(self._bare, self._parameters if lora else None)

        def write() -> None:
            if self._accelerator.is_main_process:
                evaluate.write_artifacts(folder, self._task, self._bare, whole, samples, scores)
                rows, made_on = self._run.root / METRICS, self._parallel.told()
                (folder / "README.md").write_text(card.text(self._job, metrics=rows, scores=scores, made_on=made_on))
                if self._config.output.merge:
                    self._task.merge(folder)

        self._insist(lambda: results.attempted(write))

    def _insist(self, action: Callable[[], str]) -> None:
        results.insist(
            action,
            agree=lambda fact: self._agree(fact)[0],
            waiting=lambda: bool(self._run.waiting()),
            tell=self._report.event,
        )

    def _samples(self) -> list[dict[str, str]]:
        """All processes write them where none has all of the model."""
        if not self._config.samples.prompts or not (self._accelerator.is_main_process or self._parallel.divided):
            return []
        tuned = self._written()
        if self._progress.base_samples is not None:
            base = list(self._progress.base_samples)
        else:
            with evaluate.without_adapter(self._bare):
                base = self._written()
        prompts = self._config.samples.prompts
        return [{"prompt": p, "base": b, "tuned": t} for p, b, t in zip(prompts, base, tuned, strict=True)]

    def _written(self) -> list[str]:
        with self._as_trained():
            return self._task.write(self._bare, self._device)

    def _as_trained(self) -> contextlib.AbstractContextManager[Any]:
        """Around what calls parts of the model by themselves: over a quantised base norms are wider than the head."""
        return self._accelerator.autocast() if self._config.quantised else contextlib.nullcontext()

    def _restore(self) -> None:
        """Goes on where the checkpoint ends, or from the beginning."""
        self._progress = self._keeper.restore(micro_rows=self._micro)
        if self._job.restore is None:
            return self._set(phase="evaluating", message="", total_steps=self._total)
        return self._set(
            phase="training",
            message="",
            total_steps=self._total,
            heldout_loss_before=self._progress.heldout_loss_before,
            heldout_loss=self._progress.heldout[-1][1] if self._progress.heldout else None,
        )

    def _set(self, **changes: Any) -> None:
        self._report.set(self._progress.step, **changes)
