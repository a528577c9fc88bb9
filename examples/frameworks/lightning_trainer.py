"""PyTorch Lightning: one checkpoint file, replaced every few steps, from which a new start resumes.

python lightning_trainer.py STEPS
"""

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from bytes_model import NextByte, loss, windows
from kept import ASIDE, KEPT, Stop, publish
from torch.utils.data import DataLoader

LAST = "last.ckpt"
EVERY = 20


class Model(pl.LightningModule):
    """Methods that Lightning requires of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = NextByte()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)


class Publish(pl.Callback):
    """Callback that saves every few steps, and before the program stops."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def on_train_start(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        print(f"starting from step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: pl.Trainer, model: pl.LightningModule, outputs: Any, *_: Any) -> None:
        step = trainer.global_step
        if not self.stop and step % EVERY and step != trainer.max_steps:
            return
        trainer.save_checkpoint(ASIDE / LAST)
        if trainer.is_global_zero:
            publish(ASIDE / LAST, LAST)
            print(f"saved step {step}, loss {float(outputs['loss']):.3f}", flush=True)
        trainer.should_stop = bool(self.stop)


def main(steps: int) -> None:
    stop = Stop()  # before Lightning's own handlers: Lightning keeps a SIGTERM handler that already exists
    rows: Any = windows()
    loader = DataLoader[torch.Tensor](rows, batch_size=16, shuffle=True)
    trainer = pl.Trainer(
        max_steps=steps,
        min_steps=0,
        callbacks=[Publish(stop)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = KEPT / LAST
    trainer.fit(Model(), loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    ASIDE.mkdir(exist_ok=True)
    main(int(sys.argv[1]))
