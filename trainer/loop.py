"""The training loop: from a job to a tuned model, resumable at every micro-batch, bit by bit."""

import contextlib
import json
import math
import resource
import shutil
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed

from trainer import evaluate, model, order, parallel, schedule, snapshot, tasks
from trainer.checkpoint_plan import METRICS, BadFormat, Progress
from trainer.contract.train import LoraConfig
from trainer.faults import Drained, Fault
from trainer.ipc import RunFolder, Status, WorkerJob, replace
from trainer.snapshot import Snapshot, Stored

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
        self._world, self._rank = self._parallel.world, self._parallel.rank
        self._status = Status(phase="loading", message=f"loading {config.model}")
        self._tell()
        set_seed(config.seed)
        self._task = tasks.of(config)
        examples, dropped = self._task.examples(Path(job.data), job.data_format)
        train, held = order.split(config.seed, len(examples), config.data.eval_share)
        self._train, self._held = [examples[i] for i in train], [examples[i] for i in held]
        self._total = schedule.total_steps(config, len(self._train))
        self._micro = min(config.rows_at_once, math.ceil(config.global_batch / self._world))
        self._bare = self._parallel.build(lambda hollow: self._task.model(self._precision, hollow=hollow))
        self._parameters = model.trainable(self._bare)
        optimizer = model.optimizer_of(self._parameters, config.optim)
        self._task.check(self._bare, self._device)
        self._model, self._optimizer = self._parallel.prepare(self._bare, optimizer)
        self._snapshots = snapshot.Snapshots(run, self._parallel.writer())
        self._metrics = run.root / METRICS
        self._progress = Progress()
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RATE_STEPS)
        self._report_start(dropped)

    def _report_start(self, dropped: int) -> None:
        count = sum(p.numel() for p in self._parameters.values())
        self._say(
            f"{self._config.model}: {count:,} of {sum(p.numel() for p in self._bare.parameters()):,} weights are "
            f"trained, {self._precision} on {self._parallel.told()}; {len(self._train)} rows, "
            f"{len(self._held)} held out, {self._total} steps of {self._config.global_batch}"
        )
        if dropped:
            self._say(f"{dropped} rows dropped: no target within max_length {self._config.max_length}")

    def run(self) -> None:
        """Trains to the end and leaves the complete snapshot. Raises Drained, after saving, when asked to stop."""
        self._restore()
        self._saved_at = time.monotonic()
        try:
            self._before()
            self._bare.train()
            while self._progress.step < self._total:
                self._evaluate_if_due()
                self._step()
                self._after_step()
            self._finish()
        except Drained:
            if self._progress.step or self._progress.micro:
                self._set(phase="draining", message="saving before the end")
                self._save()
                self._snapshots.join()
            raise

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
        if self._config.samples.prompts and not isinstance(self._config.method, LoraConfig):
            kept = self._task.keeps_base_samples
            written = self._task.write(self._bare, self._device) if kept else [""] * len(self._config.samples.prompts)
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
        rate = schedule.learning_rate(self._config.optim, self._progress.step, self._total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._snapshots.before_update()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._world > 1:
            loss = self._accelerator.reduce(loss, reduction="sum")
        row = {"loss": float(loss) / targets, "lr": rate, "grad_norm": norm}
        tokens = sum(self._task.size(e) for b in batches for e in b) * self._world
        self._record(row, tokens, time.monotonic() - started)

    def _clip(self) -> float:
        """Scales the gradients down where their norm is above the limit; their norm before that."""
        limit = self._config.optim.clip_norm
        return parallel.number(self._accelerator.clip_grad_norm_(self._parameters.values(), limit))

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
            with self._metrics.open("a") as file:
                file.write(json.dumps(whole) + "\n")
        self._set(
            phase="training",
            message="",
            loss=row["loss"],
            tokens_per_s=sum(t for _, t, _ in self._recent) / spent,
            rows_per_s=sum(r for _, _, r in self._recent) / spent,
        )
        self._say(
            f"step {step}/{self._total}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"{self._status.tokens_per_s:.0f} tokens/s  {seconds:.2f} s"
        )

    def _after_step(self) -> None:
        step = self._progress.step
        self._snapshots.check()
        due = time.monotonic() - self._saved_at >= self._job.save_every_s and not self._snapshots.busy
        drain, save = self._agree(self._run.drain.exists(), due and self._accelerator.is_main_process)
        if drain:
            raise Drained
        if save and step < self._total:
            self._saved_at = time.monotonic()
            self._save()

    def _evaluate_if_due(self) -> None:
        """Before the next step, not after the last one: so a run that was stopped between them measures it as well."""
        step, every = self._progress.step, self._config.eval_every_steps
        if every and self._held and step and step % every == 0 and all(at != step for at, _ in self._progress.heldout):
            self._evaluate()

    def _agree(self, *facts: bool) -> tuple[bool, ...]:
        """True for all where it is for one, so that all leave the loop and save at the same step."""
        if self._world == 1:
            return facts
        flags = self._accelerator.reduce(torch.tensor([int(f) for f in facts], device=self._device), reduction="sum")
        return tuple(bool(f) for f in flags.tolist())

    def _evaluate(self) -> tuple[float, Mapping[str, float]]:
        self._set(phase="evaluating", message=f"loss on {len(self._held)} held-out rows")

        def between() -> None:
            if self._world == 1 and self._run.drain.exists():
                raise Drained

        self._task.begins(EVALUATION)
        set_seed(order.noise(self._config.seed, EVALUATION, 0))
        loss, metrics = evaluate.heldout(
            self._task, self._bare, self._held, size=self._micro * 2, device=self._device, between=between
        )
        heldout = (*(h for h in self._progress.heldout if h[0] != self._progress.step), (self._progress.step, loss))
        self._progress = self._progress.model_copy(update={"heldout": heldout})
        self._set(heldout_loss=loss)
        told = "".join(f", {name} {value:.4f}" for name, value in metrics.items())
        self._say(f"held-out loss after {self._progress.step} steps: {loss:.4f}{told}")
        return loss, metrics

    def _finish(self) -> None:
        after, metrics = self._evaluate() if self._held else (None, {})
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
        folder = self._run.root / "artifacts"
        lora = isinstance(self._config.method, LoraConfig)
        whole = self._parallel.whole(self._bare, self._parameters if lora else None)
        if self._accelerator.is_main_process:
            evaluate.write_artifacts(folder, self._task, self._bare, whole, samples, scores)
        self._save(artifacts=folder)
        self._snapshots.join()

    def _samples(self) -> list[dict[str, str]]:
        """All processes write them where none has all of the model."""
        if not self._config.samples.prompts or not (self._accelerator.is_main_process or self._parallel.divided):
            return []
        tuned = self._task.write(self._bare, self._device)
        if self._progress.base_samples is not None:
            base = list(self._progress.base_samples)
        else:
            with evaluate.without_adapter(self._bare):
                base = self._task.write(self._bare, self._device)
        prompts = self._config.samples.prompts
        return [{"prompt": p, "base": b, "tuned": t} for p, b, t in zip(prompts, base, tuned, strict=True)]

    def _save(self, artifacts: Path | None = None) -> None:
        """Begins a snapshot; entered by all processes after the same micro-batch."""
        scaler = self._accelerator.scaler
        progress = self._progress.model_copy(
            update={
                "made_on": self._parallel.told(),
                "scaler": scaler.state_dict() if scaler is not None else None,
            }
        )
        grown = {n: p.grad for n, p in self._parameters.items() if p.grad is not None} if progress.micro else {}
        held = {
            "model": parallel.held(self._parameters),
            "optimizer": parallel.held(snapshot.optimizer_tensors(self._optimizer.optimizer, self._parameters)),
            "gradients": parallel.held(grown),
        }
        writer = self._snapshots.writer
        plan = self._parallel.plan(held, writer)
        if writer is None:
            return
        mine = artifacts if self._accelerator.is_main_process else None
        self._snapshots.begin(
            Snapshot(
                progress=progress,
                held=writer.own(held),
                plan=plan,
                metrics=self._metrics,
                artifacts=mine,
                complete=artifacts is not None,
            )
        )

    def _restore(self) -> None:
        """Puts back everything that the next step depends on; fresh seeds where there is nothing to put back."""
        if self._job.restore is None:
            self._metrics.touch()
            self._parallel.agree(self._progress)
            return self._set(phase="evaluating", message="", total_steps=self._total)
        folder = Path(self._job.restore)
        try:
            stored = Stored(folder)
            self._put_back(stored)
            if self._accelerator.is_local_main_process:
                shutil.copyfile(folder / METRICS, self._metrics)
        except (OSError, KeyError, ValueError, RuntimeError, BadFormat) as e:
            raise Fault(f"checkpoint: verified, but it does not fit this job ({type(e).__name__}: {e})") from None
        self._parallel.agree(self._progress)
        if self._accelerator.is_local_main_process:
            shutil.rmtree(folder)
        self._say(f"resumed at step {self._progress.step}")
        if self._progress.made_on != self._parallel.told():
            self._say(
                f"the checkpoint was made on {self._progress.made_on}, this is {self._parallel.told()}: the data goes "
                "on exactly, the numbers within rounding"
            )
        return self._set(
            phase="training",
            message="",
            total_steps=self._total,
            heldout_loss_before=self._progress.heldout_loss_before,
            heldout_loss=self._progress.heldout[-1][1] if self._progress.heldout else None,
        )

    def _put_back(self, stored: Stored) -> None:
        """Raises KeyError, ValueError when the tensors are not those of this job."""
        self._parallel.settle(self._bare)
        parallel.load_model(self._parameters, stored)
        parallel.load_optimizer(self._optimizer.optimizer, self._parameters, stored)
        progress = stored.progress
        if progress.micro and self._world == 1 and progress.micro_rows == self._micro:
            for name in stored.names("gradients"):
                self._parameters[name].grad = stored.read("gradients", name).to(self._device)
        elif progress.micro:  # the step is cut otherwise now, so it begins anew
            progress = progress.model_copy(update={"micro": 0, "micro_loss": 0.0})
        if progress.scaler is not None and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(progress.scaler)
        self._progress = progress.model_copy(update={"scaler": None})

    def _set(self, **changes: Any) -> None:
        peak = (
            torch.cuda.max_memory_allocated()
            if self._device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        changes |= {"step": self._progress.step, "peak_memory_bytes": peak}
        self._status = self._status.model_copy(update=changes)
        self._tell()

    def _tell(self) -> None:
        if self._accelerator.is_local_main_process:
            replace(self._run.status, self._status.model_dump_json())

    def _say(self, line: str) -> None:
        if self._accelerator.is_main_process:
            print(line, flush=True)
