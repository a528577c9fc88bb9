"""Hugging Face Trainer: resumes from the last committed checkpoint, and saves before it stops.

python hf_trainer.py MODEL STEPS
"""

import csv
import sys
from pathlib import Path
from typing import Any

from kept import ASIDE, KEPT, Stop, numbered, publish, retire
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

CHECKPOINTS = "checkpoint-*"


class Publish(TrainerCallback):
    """Callback that moves each complete checkpoint of the Trainer into the folder that the agent commits."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        print(f"starting from step {state.global_step}", flush=True)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if self.stop:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            name = f"checkpoint-{state.global_step}"
            publish(ASIDE / name, name)
            retire(CHECKPOINTS)
            print(f"saved step {state.global_step}", flush=True)


def rows(tokenizer: Any) -> list[dict[str, Any]]:
    """Return token ids and labels; the loss covers each whole text."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with Path("definitions.csv").open(newline="") as file:
        texts = [f"{row['word']}: {row['definition']}{tokenizer.eos_token}" for row in csv.DictReader(file)]
    encoded = [tokenizer(text, truncation=True, max_length=64, padding="max_length") for text in texts]
    return [{**row, "labels": labels(row["input_ids"], row["attention_mask"])} for row in encoded]


def labels(ids: list[int], mask: list[int]) -> list[int]:
    """Return the token ids with -100, which the loss ignores, in place of padding."""
    return [token if is_text else -100 for token, is_text in zip(ids, mask, strict=True)]


def main(name: str, steps: int) -> None:
    stop = Stop()
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    arguments = TrainingArguments(
        output_dir=str(ASIDE), max_steps=steps, save_steps=10, logging_steps=10, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=rows(tokenizer), callbacks=[Publish(stop)])
    last = numbered(CHECKPOINTS)[-1:]
    trainer.train(resume_from_checkpoint=str(last[0]) if last else None)
    if trainer.state.global_step == steps and not (KEPT / "model").exists():
        trainer.save_model(str(ASIDE / "model"))
        tokenizer.save_pretrained(ASIDE / "model")
        publish(ASIDE / "model", "model")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
