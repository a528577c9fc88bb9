"""One fine-tune by HF Trainer or by TRL's SFTTrainer: `python train.py hf|trl CASE.json`, run by trainer_speed.

Prints `step I/N tokens T` as each optimizer step ends; T counts tokens that are not padding.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

IGNORED = -100


class Told(TrainerCallback):
    """Callback that prints when a step ends, and its number of tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step}/{state.max_steps} tokens {self.tokens}", flush=True)
        self.tokens = 0


class Rows:
    """Collator that pads a batch to its longest row, like DataCollatorForSeq2Seq."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(r["input_ids"]) for r in rows)

        def stack(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([r[name] + [fill] * (longest - len(r[name])) for r in rows])

        ids = stack("input_ids", self._pad)
        mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": stack("labels", IGNORED)}


def counting(collate: Any, told: Told) -> Any:
    """Return the collator, which also counts what it hands out."""

    def counted(rows: list[dict[str, Any]]) -> Any:
        batch = collate(rows)
        told.tokens += int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
        return batch

    return counted


def shared(case: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Return the arguments that both trainers take; everything that costs time besides the training is off."""
    return {
        "output_dir": scratch,
        "per_device_train_batch_size": case["micro_batch"],
        "gradient_accumulation_steps": case["global_batch"] // case["micro_batch"],
        "max_steps": case["steps"],
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, case["steps"] // 10),
        "bf16": case["precision"] == "bf16",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "seed": 17,
    }


def rows_of(case: dict[str, Any]) -> list[dict[str, str]]:
    with Path(case["data"]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {"prompt": f"Word: {r['word']} ({r['part_of_speech']})\nDefinition:", "completion": f" {r['definition']}"}
        for r in rows
    ]


def adapter(case: dict[str, Any]) -> LoraConfig | None:
    if case["method"] == "full":
        return None
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")


def hf_trainer(case: dict[str, Any], told: Told, scratch: str) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    lora = adapter(case)
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, lora)

    def encoded(row: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = (prompt + completion)[: case["max_length"]]
        return {"input_ids": ids, "labels": ([IGNORED] * len(prompt) + completion)[: case["max_length"]]}

    data = Dataset.from_list([encoded(r) for r in rows_of(case)])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Trainer(
        model=model,
        args=TrainingArguments(**shared(case, scratch), remove_unused_columns=False),
        train_dataset=data,
        data_collator=counting(Rows(pad), told),
        callbacks=[told],
    )


def trl_sft(case: dict[str, Any], told: Told, scratch: str) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    config = SFTConfig(**shared(case, scratch), max_length=case["max_length"], packing=case["packing"])
    trainer: Trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows_of(case)),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
        peft_config=adapter(case),
        callbacks=[told],
    )
    trainer.data_collator = counting(trainer.data_collator, told)
    return trainer


def main() -> None:
    import tempfile

    kind, case = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    told = Told()
    with tempfile.TemporaryDirectory() as scratch:
        (hf_trainer if kind == "hf" else trl_sft)(case, told, scratch).train()


if __name__ == "__main__":
    main()
