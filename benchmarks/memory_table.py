"""Estimated memory against published measurements and against the tracer: `python -m benchmarks.memory_table`.

Every row of both files is reported: compared, or refused with the reason. The last line is JSON. `--no-trace` leaves
out the comparison with the tracer, which needs the trainer's packages and about two minutes of one core.
"""

import argparse
import csv
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from broker.estimator.memory.device_overhead import CUBLAS_WORKSPACE
from broker.model_catalog import catalog as catalogue
from broker.sizing.estimate import estimate

DATA = Path(__file__).parent / "data"
LLAMA_2_70B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_32_3B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
    "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
    "new_decoder_architecture": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 2048,
}  # fmt: skip
SANTACODER = {
    "model_type": "gpt_bigcode", "vocab_size": 49280, "n_embd": 2048, "n_layer": 24, "n_head": 16,
    "n_inner": 8192,
    "n_positions": 2048, "multi_query": True, "activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GRANITE_3B = {
    "model_type": "granite", "vocab_size": 49152, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36, "num_key_value_heads": 36, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
TRACED: Mapping[str, Mapping[str, Any] | None] = {
    "meta-llama/Llama-3.1-8B": None, "mistralai/Mistral-7B-v0.1": None, "HuggingFaceTB/SmolLM2-135M": None,
    "Qwen/Qwen2.5-1.5B": None, "Qwen/Qwen3-8B": None, "microsoft/Phi-3-mini-4k-instruct": None,
    "google/gemma-2b": None, "google/gemma-2-2b": None, "google/gemma-3-1b-pt": None, "openai-community/gpt2": None,
    "EleutherAI/pythia-1.4b": None, "microsoft/phi-2": None, "bigcode/starcoder2-3b": None,
    "granite-3b": GRANITE_3B, "falcon-7b": FALCON_7B, "santacoder": SANTACODER,
}  # fmt: skip


FMS = {"fms_a100_80gb.csv": "4.48.1", "fms_a100_80gb_4_45.csv": "4.45.2"}
"""fms-acceleration's files, and the transformers of each."""
OF_SANTACODER = {
    "fms_a100_80gb_santacoder.csv": "4.48.1",
    "fms_a100_80gb_santacoder_4_45.csv": "4.45.2",
}
"""The same of a model whose layers keep more; also a group of its own."""
CONFIGS: Mapping[str, Mapping[str, Any]] = {"NousResearch": LLAMA_2_70B, "bigcode": SANTACODER}
"""Configs by owner, for models outside the catalogue."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row of the table, in bytes. `what`: the measured quantity."""

    source: str
    name: str
    what: str
    measured: int
    estimated: int
    margin: float

    @property
    def error(self) -> float:
        """Return the estimate's error in percent; negative: too little."""
        return 100 * (self.estimated / self.measured - 1)

    @property
    def beyond(self) -> bool:
        """Return True if the measured memory exceeds the estimate with its margin."""
        return self.measured > self.estimated * (1 + self.margin)


@dataclass(frozen=True, kw_only=True)
class Refused:
    source: str
    name: str
    reason: str


def rows_of(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open() as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def fms_estimate(row: Mapping[str, str], version: str) -> dict[str, Any]:
    """Return the estimate for a row of fms-acceleration."""
    gpus, quantised = int(row["num_gpus"]), "bnb" in row["framework_config"]
    config = CONFIGS.get(row["model_name_or_path"].split("/")[0])
    return estimate(
        None if config else row["model_name_or_path"],
        config=config,
        method="qlora" if quantised else "lora" if row["peft_method"] else "full",
        optimizer="adamw_foreach",
        precision="bf16-autocast" if row["bf16"] else "bf16",
        # TRL raises the norms under the stock plug-in; the accelerated one prepares the base itself, and leaves them
        norms="half" if row["framework_config"] == "accelerated-peft-bnb" else "float32",
        seq=2048 if config is SANTACODER else 4096,
        micro_batch=int(row["per_device_train_batch_size"]),
        gpus=gpus,
        sharding="fsdp" if gpus > 1 else "none",
        gradient_checkpointing=True,
        lora_r=16,
        lora_targets=row["target_modules"].replace(" ", ",") or "all-linear",
        lora_dropout=0.1,
        attention="flash",
        stack=f"transformers={version}",
    )


def fms(file: str, version: str) -> Iterator[Compared]:
    """fms-acceleration: peak allocated on A100, and what nvidia-smi showed."""
    for row in rows_of(file):
        found = fms_estimate(row, version)
        name = f"{row['model_name_or_path'].split('/')[-1]} {row['framework_config']} {row['peft_method'] or 'full'}"
        name += f" batch {row['per_device_train_batch_size']}, {row['num_gpus']} GPU"
        name = name if version == "4.48.1" else f"{version} {name}"
        allocated = int(row["mem_peak_torch_mem_alloc_in_bytes"])
        shown = int(row["mem_nvidia_mem_reserved"]) * 2**20
        for what, measured, key, margin in (
            ("allocated", allocated, "peak_allocated_bytes", "margin_pct"),
            ("nvidia-smi", shown, "device_used_bytes", "device_margin_pct"),
        ):
            yield Compared(
                source="fms", name=name, what=what, measured=measured, estimated=found[key], margin=found[margin] / 100
            )


def peft() -> Iterator[Compared | Refused]:
    """peft's method comparison: the most that the allocator reserved on an L40S, without the context."""
    for row in rows_of("peft_method_comparison.csv"):
        name = Path(row["file"]).stem
        if not row["model"].endswith("Llama-3.2-3B"):
            yield Refused(source="peft", name=name, reason=f"{row['model']} is not a decoder")
            continue
        asked: dict[str, Any] = {
            "config": LLAMA_32_3B, "optimizer": "adamw_foreach", "precision": "bf16", "seq": int(row["max_seq"]),
            "micro_batch": int(row["bs"]), "stack": "transformers=5.0.0", "lora_dropout": 0.0,
            "lora_targets": "gate_proj,up_proj,down_proj" if "mlp" in name else "q_proj,v_proj",
        }  # fmt: skip
        what, method = "reserved", "full" if row["peft"] == "FULL" else "lora"
        estimated = estimate(**asked, method=method, lora_r=int(row["r"] or 16))
        if row["peft"] not in ("FULL", "LORA") or estimated["trainable_parameters"] != int(row["trainable"]):
            what = "reserved, other adapter"
            estimated = estimate(**asked, method="adapter", trainable_parameters=int(row["trainable"]))
        yield Compared(
            source="peft", name=name, what=what, measured=int(row["mem_max"]),
            estimated=estimated["device_used_bytes"] - 2**29, margin=estimated["margin_pct"] / 100,
        )  # fmt: skip


def traced() -> Iterator[Compared | Refused]:
    """Yield the trainer's own step on a GPU: closed form against the tracer."""
    from accelerate.state import AcceleratorState

    from trainer.memtrace import __main__ as memtrace_main
    from trainer.memtrace import tracer as memtrace

    cases = [*product(("full", "lora"), ("bf16", "fp32"), ((1, False), (4, False), (1, True), (4, True)))]
    for name, config in TRACED.items():
        given: Mapping[str, Any] = config or catalogue.find(name).config  # type: ignore[union-attr]
        length = 1024 if given["model_type"] == "gpt2" else 2048
        for method, precision, (batch, checkpointing) in cases:
            AcceleratorState._reset_state(True)
            arguments = f"--config x --method {method} --precision {precision} --seq {length} --micro-batch {batch}"
            arguments += " --gradient-checkpointing" if checkpointing else ""
            asked = memtrace_main.options(memtrace_main.parser().parse_args(arguments.split()))
            peak = memtrace.extrapolate(given, asked)
            estimated = estimate(
                config=given,
                method=method,
                precision="bf16-autocast" if precision == "bf16" else precision,
                seq=length,
                micro_batch=batch,
                gradient_checkpointing=checkpointing,
            )
            workspace = CUBLAS_WORKSPACE  # which the tracer does not count
            words = (
                f"{name.split('/')[-1]} {method} {precision} batch {batch}{' checkpointing' if checkpointing else ''}"
            )
            yield Compared(
                source="trace", name=words, what="allocated", measured=peak.peak_allocated_bytes,
                estimated=estimated["peak_allocated_bytes"] - workspace, margin=estimated["margin_pct"] / 100,
            )  # fmt: skip


def summary(rows: list[Compared]) -> dict[str, float | int]:
    """Return errors of some rows, percent."""
    errors = [abs(r.error) for r in rows]
    return {
        "n": len(rows),
        "median_abs_pct": round(statistics.median(errors), 3),
        "mean_abs_pct": round(statistics.fmean(errors), 3),
        "max_abs_pct": round(max(errors), 2),
        "under_beyond_margin": sum(r.beyond for r in rows),
    }


def _groups(compared: list[Compared]) -> dict[str, list[Compared]]:
    every = [r for r in compared if r.source != "trace"]
    santacoder = [r for r in every if "santacoder" in r.name]
    kept = [r for r in every if r.what == "allocated"]
    return {
        "allocated_one_gpu": [r for r in kept if r.name.endswith(" 1 GPU")],
        "allocated_two_gpus": [r for r in kept if r.name.endswith(" 2 GPU")],
        "nvidia_smi": [r for r in every if r.what == "nvidia-smi"],
        "reserved": [r for r in every if r.what == "reserved"],
        "reserved_other_adapters": [r for r in every if r.what == "reserved, other adapter"],
        "santacoder": [r for r in santacoder if r.what == "allocated"],
        "santacoder_nvidia_smi": [r for r in santacoder if r.what == "nvidia-smi"],
        "form_against_trace": [r for r in compared if r.source == "trace"],
    }


def main() -> None:
    """Print every row, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-trace", action="store_true", help="leave out the comparison with the tracer")
    args = parser.parse_args()
    found: list[Compared | Refused] = [
        *(row for file, version in (FMS | OF_SANTACODER).items() for row in fms(file, version)),
        *peft(),
    ]
    if not args.no_trace:
        found += traced()
    for row in found:
        if isinstance(row, Refused):
            print(f"{row.source:5} refused  {row.name}: {row.reason}")
            continue
        mark = " beyond the margin" if row.beyond else ""
        size = f"{row.measured / 2**30:8.3f} GiB, estimated {row.estimated / 2**30:8.3f}"
        print(f"{row.source:5} {row.error:+7.2f} %  {size}  {row.what}: {row.name}{mark}")
    compared = [r for r in found if isinstance(r, Compared)]
    every = [r for r in compared if r.source != "trace"]
    kept, groups = [r for r in every if r.what == "allocated"], _groups(compared)
    refused = Counter(r.reason.split(" is")[0].split(" of")[0] for r in found if isinstance(r, Refused))
    document = {
        **summary(kept),
        "rows": len(every),
        "under_beyond_margin": sum(r.beyond for r in every),  # of all of them
        **{name: summary(rows) for name, rows in groups.items() if rows},
        "refused": sum(refused.values()),
        "refused_by_reason": dict(refused),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
