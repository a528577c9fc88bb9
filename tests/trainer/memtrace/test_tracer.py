"""The tracer against torch: the same step, computed on this CPU, allocates the same storages."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import peft
import torch
from accelerate.state import AcceleratorState
from torch.nn import functional

from trainer.contract.data_config import DataConfig
from trainer.contract.train import FullConfig, LoraConfig, QloraConfig, TrainConfig
from trainer.memtrace import storage_tracker as storages
from trainer.memtrace import tracer as memtrace
from trainer.memtrace.device_emulation import DeviceEmulation, allowed
from trainer.memtrace.inputs import task_of
from trainer.memtrace.probe import TraceOptions
from trainer.memtrace.storage_tracker import Storages
from trainer.memtrace.tracer import CATEGORIES, Peak, at_depth, extrapolate, mark, trace, watch

GIB = 1024**3
PURE = {(1, True): 59.8, (1, False): 60.1, (4, True): 60.7, (4, False): 105.9}
"""GiB of Llama-3-8B in pure bf16, full, 2048 tokens, by (rows, checkpointing): another tracer, held against A100s."""
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 3, "max_position_embeddings": 512},
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 32, "attn_implementation": "eager"}
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 3, "vocab_size": 1000, "n_positions": 512},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
FALCON: dict[str, Any] = {
    **{"model_type": "falcon", "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3},
    **{"vocab_size": 1000, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
    **{"max_position_embeddings": 512},
}
LLAMA_3_8B: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
}


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Reset accelerate's state, which is global to the process and includes the precision."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def ask(
    method: str = "lora",
    *,
    device: str = "cuda",
    sequence: int = 128,
    foreach: bool = False,
    padded: bool = False,
    **train: Any,
) -> TraceOptions:
    config = TrainConfig(
        model="traced",
        data=DataConfig(path="x.jsonl", completion="{x}"),
        method={"full": FullConfig, "lora": LoraConfig, "qlora": QloraConfig}[method](),
        **{"micro_batch": 2, "global_batch": train.get("micro_batch", 2), "precision": "bf16", **train},
    )
    return TraceOptions(train=config, sequence=sequence, device=device, foreach=foreach)


def totals(segments: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(categories.values()) for name, categories in segments.items()}


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (LLAMA, ask("full", device="cpu")),
        (LLAMA, ask("full", device="cpu", gradient_checkpointing=True)),
        (LLAMA, ask("full", device="cpu", precision="fp32", global_batch=4)),
        (LLAMA, ask("full", device="cpu", precision="fp32", foreach=True)),
        (LLAMA, ask("lora", device="cpu")),
        (LLAMA, ask("lora", device="cpu", gradient_checkpointing=True)),
        (LLAMA, ask("full", device="cpu", padded=True)),
        (QWEN2, ask("full", device="cpu")),
        (GEMMA2, ask("lora", device="cpu")),
        (GPT2, ask("full", device="cpu")),
        (LLAMA | {"model_type": "olmo2"}, ask("lora", device="cpu")),
        (LLAMA | {"model_type": "cohere2"}, ask("full", device="cpu")),
        (FALCON, ask("full", device="cpu", precision="fp32")),
        (LLAMA, ask("qlora", device="cpu")),
        (LLAMA, ask("qlora", device="cpu", gradient_checkpointing=True)),
    ],
)
def test_the_trace_equals_torchs_allocations(model: dict[str, Any], wanted: TraceOptions) -> None:
    traced, real = trace(model, 3, wanted), trace(model, 3, wanted, real=True)
    sizes, measured = totals(traced), totals(real)
    worst = max(measured, key=lambda name: measured[name])
    assert max(sizes, key=lambda name: sizes[name]) == worst
    assert sizes[worst] == pytest.approx(measured[worst], abs=256 + 24_000 * wanted.padded)  # scalars on the host
    for segment, size in measured.items():
        assert sizes[segment] == pytest.approx(size, rel=0.01), segment
    for category, size in real[worst].items():
        assert traced[worst].get(category, 0) == pytest.approx(size, rel=0.001, abs=64), category


MAMBA2 = {
    "model_type": "mamba2", "hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1,
    "chunk_size": 64, "vocab_size": 1000, "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "full"])
def test_products_of_einsum_are_half_precision_under_autocast(method: str) -> None:
    """Mamba layers consist of such products; in float32 they need a quarter more memory."""
    wanted = replace(ask(method, device="cpu"), targets=("in_proj",) if method == "lora" else ())
    traced, real = totals(trace(MAMBA2, 3, wanted)), totals(trace(MAMBA2, 3, wanted, real=True))
    assert max(traced.values()) == pytest.approx(max(real.values()), rel=0.02)


SQUARE = torch.ones(8, 8)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: functional.linear(x, SQUARE) + functional.linear(x, SQUARE),
        lambda x: x.bfloat16() @ SQUARE.bfloat16() + x.bfloat16() @ SQUARE.bfloat16(),
        lambda x: functional.linear(x, SQUARE) + x,
        lambda x: x * 2 + x * 3 + x * 4,
        lambda x: ((x + x * 2) + x * 4) * 5 + (x + x * 6) * SQUARE[:1],
    ],
    ids=["views", "casts", "residual", "products", "shared"],
)
def test_gradients_are_added_in_place_where_torch_does_without_a_mode(
    step: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss() -> torch.Tensor:
        return step(torch.ones(2, 4, 8, requires_grad=True) * 2).sum()

    alone, watched = loss(), loss()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        alone.backward()  # type: ignore[no-untyped-call]
    found: list[bool] = []
    asked = storages._adds_in_place

    def told(func: Any, args: Any) -> bool:
        if func is torch.ops.aten.add.Tensor:
            found.append(asked(func, args))
        return asked(func, args)

    monkeypatch.setattr(storages, "_adds_in_place", told)
    with Storages("cpu"):
        watched.backward()  # type: ignore[no-untyped-call]
    assert found == [e.name == "aten::add_" for e in seen.events() if e.name in ("aten::add", "aten::add_")]


def test_a_base_of_4_bits_has_the_adapters_that_peft_gives_a_loaded_one() -> None:
    wanted = ask("qlora")
    model = memtrace._build(LLAMA, (1,), wanted, task_of(wanted.task, wanted.train, LLAMA), device="meta")
    kinds = {type(m) for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert kinds == {peft.tuners.lora.bnb.Linear4bit}


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_four_layers_tell_the_peak_of_any_depth(method: str, checkpointing: bool) -> None:
    wanted = ask(method, gradient_checkpointing=checkpointing)
    whole = totals(trace(LLAMA, 9, wanted))
    assert extrapolate({**LLAMA, "num_hidden_layers": 9}, wanted).peak_allocated_bytes == max(whole.values())


def peak(method: str = "lora", model: dict[str, Any] = LLAMA, **wanted: Any) -> Peak:
    return extrapolate(model, ask(method, **wanted))


def test_the_categories_sum_to_the_peak() -> None:
    found = peak("full")
    assert sum(found.by_category.values()) == found.peak_allocated_bytes == found.segments[found.segment]


def test_an_8b_model_holds_what_the_trainer_holds() -> None:
    """Weights in float32 for a full fine-tune (autocast), in bf16 under adapters; moments twice the trained weights."""
    parameters = 8_030_261_248
    full = peak("full", LLAMA_3_8B, sequence=2048, micro_batch=1).by_category
    assert full["weights"] == pytest.approx(4 * parameters, rel=1e-3)
    assert full["optimizer"] == pytest.approx(8 * parameters, rel=1e-3)
    lora = peak("lora", LLAMA_3_8B, sequence=2048, micro_batch=1).by_category
    assert lora["weights"] == pytest.approx(2 * parameters + 4 * 41_943_040, rel=1e-3)


def pure_bf16_step(layers: int, rows: int, checkpointing: bool) -> dict[str, dict[str, int]]:
    """Return a step as transformers' own loss takes it: no master weights, no autocast."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {n: v for n, v in LLAMA_3_8B.items() if n not in ("model_type", "num_hidden_layers")}
    with torch.device("meta"), allowed(), DeviceEmulation("cuda") as emulation:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **fields)).bfloat16().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        storages = Storages("meta", block=512)
        mark(model, storages)
        watch(storages, emulation)
        storages.enter("forward embeddings", "activations")
        ids = torch.zeros((rows, 2048), dtype=torch.long)
        with storages:
            for tensor in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())):
                storages.hold(tensor, "weights")
            model(input_ids=ids, labels=ids).loss.backward()
            storages.enter("optimizer", "temporary")
            optimizer.step()
    return {name: categories for name, (_, categories) in storages.peaks.items()}


@pytest.mark.parametrize(("case", "gib"), PURE.items())
def test_an_8b_model_in_pure_bf16_agrees_with_another_tracer(case: tuple[int, bool], gib: float) -> None:
    rows, checkpointing = case
    peaks = at_depth([((n,), pure_bf16_step(n, rows, checkpointing)) for n in (3, 4)], (32,))
    assert max(totals(peaks).values()) / GIB == pytest.approx(gib, rel=0.003)


def test_checkpointing_lowers_the_peak_and_larger_batches_raise_it() -> None:
    plain = peak(sequence=256).peak_allocated_bytes
    assert peak(sequence=256, gradient_checkpointing=True).peak_allocated_bytes < plain
    assert peak(sequence=256, micro_batch=4).peak_allocated_bytes > plain
    assert peak(sequence=256, device="cpu").peak_allocated_bytes > plain  # a GPU's dropout masks are bool
    full = peak("full", sequence=16)
    copies = peak("full", sequence=16, foreach=True)
    assert copies.segment == "optimizer"
    assert copies.peak_allocated_bytes - full.peak_allocated_bytes > 0.9 * full.by_category["weights"]


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 12}))
    command = [
        sys.executable,
        "-m",
        "trainer.memtrace",
        "--config",
        str(config),
        "--seq",
        "64",
        "--method",
        "full",
    ]
    done = subprocess.run([*command, "--gradient-checkpointing"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    deep = {**LLAMA, "num_hidden_layers": 12}
    here = peak("full", deep, sequence=64, micro_batch=4, gradient_checkpointing=True)
    assert document["segments"] == here.segments  # by libraries that are whole
    assert document["peak_allocated_bytes"] == sum(document["by_category"].values())
    assert set(document["by_category"]) == set(CATEGORIES)
    assert document["by_category"]["communication"] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nope", "Expecting value"),
        ("[]", "is not a JSON object"),
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), "no positive num_hidden_layers"),
        (json.dumps({**LLAMA, "model_type": "unheard-of"}), "unheard-of"),
        (json.dumps({**LLAMA, "num_local_experts": 4}), "mixture of experts"),
    ],
)
def test_an_untraceable_config_is_refused_in_one_line(text: str, words: str, tmp_path: Path, capsys: Any) -> None:
    from trainer.memtrace.__main__ import main

    config = tmp_path / "config.json"
    config.write_text(text)
    assert main(["--config", str(config)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_a_row_of_one_token_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.memtrace.__main__ import main

    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert main(["--config", str(config), "--seq", "1"]) == 2
    assert (
        capsys.readouterr().err.strip()
        == f"{config}: --seq 1: a row of one token has no next one to learn; give 2 or more"
    )
