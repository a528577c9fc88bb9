"""Measure the cost of a checkpoint: the time for which a save pauses training, and the time of a restore.

In `python -m benchmarks.save_stall` the real agent trains a model of SmolLM2-135M's size over a folder as blob store,
saving every few seconds. `stall_share` is the loop's pause for a save over the time of a step, as the worker measured
both. `slowdown_share` compares steps during a save (copy, write, upload) with other steps. It includes the load of the
save on processor and disk.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from trainer.agent.agent import Agent
from trainer.agent.base.environment import Environment
from trainer.checkpoint import protocol as checkpoint
from trainer.contract import object_keys as keys
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import AttemptSpec, DataFile, Limits, Outcome
from trainer.contract.train import CheckpointConfig, FullConfig, LoraConfig, TrainConfig
from trainer.objectstore.objects import Objects, connect

MODEL = Path(".demo/models/smollm2-135m-instruct")
PROMPT = Path("examples/devils-dictionary.csv")


def build_model(folder: Path) -> None:
    """Write a model of the same shape with random weights, and a tokenizer that splits at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


async def measure(method: LoraConfig | FullConfig, model: Path, steps: int, every_s: float) -> dict[str, Any]:
    """Train once, restore the latest save, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="gpubroker-bench-") as scratch:
        folder = Path(scratch)
        url = (folder / "store").as_uri()
        objects = Objects(connect(url, {}), "bench")
        content = PROMPT.read_bytes()
        data = DataFile(key="data", sha256=checkpoint.sha256_of(PROMPT), bytes=len(content), format="csv")
        train = TrainConfig(
            model=str(model.resolve()),
            data=DataConfig(path="x.csv", prompt="Define {word}:", completion=" {definition}", eval_share=0),
            method=method,
            max_steps=steps,
            max_length=128,
        )
        spec = AttemptSpec(
            installation="bench",
            job="job",
            attempt="attempt",
            number=1,
            train=train,
            data=data,
            checkpoint=CheckpointConfig(every_s=every_s),
            limits=Limits(deadman_s=0),
        )
        await objects.write("data", content)
        await objects.write(keys.spec("attempt"), spec.model_dump_json().encode())
        lines: list[str] = []
        env = Environment(blobs=url, installation="bench", attempt="attempt", workdir=folder / "work")
        outcome = await Agent(env, echo=lines.append).run()
        if outcome is not Outcome.COMPLETED:
            raise SystemExit("\n".join(lines[-20:]))
        return await _figures(objects, folder, lines)


async def _figures(objects: Objects, folder: Path, lines: list[str]) -> dict[str, Any]:
    origin = checkpoint.Origin(job="job", attempt="attempt", kind="train")
    last, *before = await checkpoint.own_manifests(objects, origin)
    if not before:
        raise SystemExit("nothing was saved before the end; lower --every, or raise --steps")
    started = time.monotonic()
    restored = await checkpoint.restore(objects, before, folder / "back", kind="train", log=lines.append)
    restore_s = time.monotonic() - started
    assert restored is not None
    assert not restored[1].complete, "the complete checkpoint also has the results, and no run resumes from it"
    metrics = await objects.read(f"{keys.files_prefix(last)}metrics.jsonl")
    rows = [json.loads(line) for line in (metrics or b"").decode().splitlines()][1:]
    saved = [line for line in lines if "committed" in line]
    steps_saved = {int(line.split("step ")[1].split()[0]) + 1 for line in saved}
    stalls = [float(line.rsplit(" ", 2)[1]) / 1e3 for line in saved[:-1]]  # no training waits for the last save
    with_save = [r["seconds"] / r["tokens"] for r in rows if r["step"] in steps_saved]
    without = [r["seconds"] / r["tokens"] for r in rows if r["step"] not in steps_saved]
    step_s = statistics.median(r["seconds"] for r in rows)
    slower = statistics.median(with_save) / statistics.median(without) - 1 if with_save and without else None
    return {
        "saves": len(saved),
        "megabytes": round(sum(f.bytes for f in restored[1].files) / 1e6, 1),
        "step_s": round(step_s, 3),
        "stall_ms": round(statistics.mean(stalls) * 1e3, 2),
        "stall_ms_max": round(max(stalls) * 1e3, 2),
        "stall_share": round(statistics.mean(stalls) / step_s, 5),
        "slowdown_share": None if slower is None else round(slower, 3),
        "restore_s": round(restore_s, 3),
    }


async def main() -> None:
    """Print the figures of both methods; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between saves")
    parser.add_argument("--method", choices=("lora", "full", "both"), default="both")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpubroker-model-") as scratch:
        model = MODEL
        if not model.exists():
            model = Path(scratch)
            build_model(model)
        figures: dict[str, Any] = {}
        for name, method in (("lora", LoraConfig()), ("full", FullConfig())):
            if arguments.method in (name, "both"):
                figures[name] = await measure(method, model, arguments.steps, arguments.every)
                print(name, figures[name], flush=True)
    figures["stall_share"] = max(f["stall_share"] for f in figures.values())
    figures["restore_s"] = max(f["restore_s"] for f in figures.values() if isinstance(f, dict))
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main())
