"""Measured training speeds, each as a step of the model of time: what ran, on which GPU, and tokens/s of one GPU."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.memory_table import LLAMA_2_70B, LLAMA_32_3B
from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics
from broker.estimator.architecture.model_states import trained_parameters
from broker.estimator.memory import estimate as sizes
from broker.estimator.speed.hardware import TABLE, Hardware
from broker.estimator.speed.roofline import Ideal, RooflineStep, ideal
from broker.model_catalog import catalog as catalogue
from broker.model_catalog.decoder_shape import shape_of

DATA = Path(__file__).parent / "data"
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers and heads of llm-foundry's models (its scripts/train/yamls)."""
FOUNDRY_GPUS = {"h100_80gb": "h100-sxm", "a100_80gb": "a100-80gb-sxm", "a100_40gb": "a100-40gb"}
FOUNDRY_NETWORK = {"h100_80gb": 400e9, "a100_80gb": 200e9, "a100_40gb": 200e9}
"""Bytes/s into a machine: 1600 Gbit/s by the tables' headings, 3200 for the H100s [assumed]."""
H100_500W = replace(TABLE["h100-sxm"], name="h100-500w", bandwidth=2.4e12, matmul_flops=0.8 * 989.4e12)
"""torchtitan's H100: 96 GB of HBM2e with 2.4 TB/s, 500 W; no matrix products of it were published."""
TOKENS_A_ROW = 4_198_051 / 20_000
"""Tokens of a row in peft's comparison: its results state the tokens of its 20,000 rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. `group`: what is left out together; `at_best`: its step at the published rates.

    `tokens`: of one GPU and step; `rate`: tokens/s of one GPU.
    """

    source: str
    name: str
    gpu: str
    group: str
    method: str
    family: str
    tokens: float
    rate: float
    at_best: tuple[Ideal, ...]
    """The mean of these, for what lies between two of them."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    source: str
    name: str
    reason: str


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open() as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def _row(
    source: str, name: str, group: str, run: RooflineStep, hardware: Hardware, rate: float, *others: RooflineStep
) -> Row:
    return Row(
        source=source,
        name=name,
        gpu=hardware.name,
        group=group,
        method=f"{run.numerics.bits}-bit" if run.numerics.bits else "full" if run.numerics.full else "lora",
        family=run.shape.family,
        tokens=run.tokens * run.micro_batches,
        rate=rate,
        at_best=tuple(ideal(r, hardware) for r in (run, *others)),
    )


def foundry() -> Iterator[Row | Refused]:
    """llm-foundry: MPT models trained under FSDP, full, in bf16, with fused kernels."""
    for row in _rows("llm_foundry_mpt.csv"):
        name = f"{row['Model']}, {row['# GPUs']} x {row['GPU']}, {row['SeqLen (T)']} x {row['MicroBatchSize']}"
        if row["Precision"] == "amp_fp8":
            yield Refused(source="llm-foundry", name=name, reason="fp8 is not in the model of time")
            continue
        width, layers, heads = MPT[row["Model"]]
        pure, devices, length = row["MP Mode"] == "PURE", int(row["# GPUs"]), int(row["SeqLen (T)"])
        shape = ModelShape(
            name=row["Model"], family="gpt2", layers=layers, hidden=width, intermediate=4 * width, heads=heads,
            kv_heads=heads, head_dim=width // heads, vocabulary=50368, tied_embeddings=True,
            parameters=int(row["NumParams"]), known=True, gated_mlp=False,
        )  # fmt: skip
        run = RooflineStep(
            shape=shape,
            numerics=Numerics(weight=2, trained=4, compute=2, full=True),
            tokens=int(row["MicroBatchSize"]) * length,
            length=length,
            trained=shape.parameters,
            micro_batches=int(row["GradAccum"]),
            recompute="early" if row["Activation Checkpointing"] == "True" else "none",
            fused=True,
            devices=devices,
            nodes=max(1, devices // 8),
            sharding="fsdp",
            gathers=2 if row["Sharding Strategy"] == "FULL_SHARD" else 1,
            reduced=2 if pure else 4,
            network=FOUNDRY_NETWORK[row["GPU"]],
        )
        rate = float(row["Throughput (T/s/GPU)"])
        yield _row("llm-foundry", name, row["Model"], run, TABLE[FOUNDRY_GPUS[row["GPU"]]], rate)


def torchtitan() -> Iterator[Row | Refused]:
    """torchtitan: Llama 3.1 8B, full, FSDP, checkpointing of every other matrix product: between none and all."""
    for row in _rows("torchtitan.csv"):
        name = f"{row['model']}, {row['n_gpu']} x {row['gpu']}, {row['row']}"
        if "fp8" in row["row"]:
            yield Refused(source="torchtitan", name=name, reason="fp8 is not in the model of time")
            continue
        found = catalogue.find("meta-llama/Llama-3.1-8B")
        assert found is not None
        shape, length, devices = shape_of("llama", found.config), int(row["seq"]), int(row["n_gpu"])
        run = RooflineStep(
            shape=shape, numerics=Numerics(weight=2, trained=4, compute=2, full=True),
            tokens=int(row["local_bs"]) * length, length=length, trained=shape.parameters,
            fused="compile" in row["row"], devices=devices, nodes=max(1, devices // 8), sharding="fsdp", reduced=4,
            network=400e9,
        )  # fmt: skip
        other = replace(run, recompute="early")
        yield _row("torchtitan", name, "torchtitan", run, H100_500W, float(row["tps_per_gpu"]), other)


def _asked(shape: ModelShape, ask: sizes.EstimateOptions) -> RooflineStep:
    numerics = sizes.numerics(shape, ask)[0]
    return RooflineStep(
        shape=shape,
        numerics=numerics,
        tokens=ask.rows * ask.length,
        length=ask.length,
        trained=trained_parameters(shape, numerics),
        optimizer=ask.optimizer,
        devices=ask.gpus,
        sharding="fsdp" if ask.gpus > 1 else "none",
    )


def fms(file: str = "fms_a100_80gb.csv", source: str = "fms", release: str = "4.48.1") -> Iterator[Row | Refused]:
    """fms-acceleration: reentrant checkpointing, rows of 4096 tokens."""
    for row in _rows(file):
        gpus, batch = int(row["num_gpus"]), int(row["per_device_train_batch_size"])
        plug_in, name = row["framework_config"], _model(row["model_name_or_path"])
        known = None if name == "Llama-2-70B" else catalogue.find(f"mistralai/{name}-v0.1")
        shape = shape_of(name, LLAMA_2_70B if known is None else known.config, mixtures=True)
        method = "qlora" if "bnb" in plug_in else "lora" if row["peft_method"] else "full"
        ask = sizes.EstimateOptions(
            method=method,  # type: ignore[arg-type]
            optimizer="adamw_foreach", precision="bf16-autocast" if row["bf16"] else "bf16",
            length=4096, rows=batch, gpus=gpus, sharding="fsdp" if gpus > 1 else "none",
            targets=tuple(row["target_modules"].split()) or ("all-linear",), dropout=0.1, attention="flash",
            transformers=release,
        )  # fmt: skip
        run = replace(_asked(shape, ask), recompute="whole")
        if plug_in == "accelerated-peft-bnb":  # autocast as well, but it leaves norms in half precision
            run = replace(run, numerics=replace(run.numerics, norms_float32=False))
        rate, name = float(row["train_tokens_per_second"]), f"{name} {plug_in} {method} batch {batch}, {gpus} GPU"
        yield _row(source, name, f"{source} {method}", run, TABLE["a100-80gb-sxm"], rate)


def _model(path: str) -> str:
    """Return the model's name in the catalogue, except for Llama 2's."""
    return next((name for name in ("Mistral-7B", "Mixtral-8x7B") if name in path), "Llama-2-70B")


def blind() -> list[Row]:
    """The same of an earlier version, transformers 4.45.2, with a mixture of experts: nothing was fitted on them."""
    return [row for row in fms("fms_a100_80gb_4_45.csv", "fms 4.45", "4.45.2") if isinstance(row, Row)]


def peft() -> Iterator[Row | Refused]:
    """peft's comparison on an L40S: bf16 without autocast, foreach AdamW, four rows of 210 tokens; never fitted."""
    shape = shape_of("llama-3.2-3b", LLAMA_32_3B)
    for row in _rows("peft_method_comparison.csv"):
        name = Path(row["file"]).stem
        if not row["model"].endswith("Llama-3.2-3B") or row["peft"] not in ("FULL", "LORA"):
            reason = "no decoder" if not row["model"].endswith("Llama-3.2-3B") else "neither full nor plain LoRA"
            yield Refused(source="peft", name=name, reason=reason)
            continue
        mlp = "target-mlp" in name
        ask = sizes.EstimateOptions(
            method="full" if row["peft"] == "FULL" else "lora", optimizer="adamw_foreach", precision="bf16",
            rows=int(row["bs"]), rank=int(row["r"] or 16), dropout=0.0,
            targets=("gate_proj", "up_proj", "down_proj") if mlp else ("q_proj", "v_proj"),
        )  # fmt: skip
        run = replace(_asked(shape, ask), tokens=ask.rows * TOKENS_A_ROW, length=TOKENS_A_ROW)
        if run.trained != int(row["trainable"]):
            yield Refused(source="peft", name=name, reason="a variant of LoRA that trains other weights")
            continue
        yield _row("peft", name, f"peft {ask.method}", run, TABLE["l40s"], float(row["tok_s"]))


def everything() -> tuple[list[Row], list[Refused]]:
    """Every row of the four files that the fit knows: those that can be estimated, and the others with the reason."""
    found = [*foundry(), *torchtitan(), *fms(), *peft()]
    return [r for r in found if isinstance(r, Row)], [r for r in found if isinstance(r, Refused)]
