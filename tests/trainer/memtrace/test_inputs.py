"""Traces of encoder-decoders, whose two stacks are extrapolated to their own depths."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
from accelerate.state import AcceleratorState

from trainer.memtrace import __main__ as memtrace_main
from trainer.memtrace.tracer import extrapolate, trace

ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
T5: dict[str, Any] = {
    "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 6,
    "num_decoder_layers": 5, "vocab_size": 500, **ENDS,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 6, "decoder_layers": 5, "encoder_ffn_dim": 128, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 500, **ENDS,
}  # fmt: skip
WHISPER = BART | {"model_type": "whisper", "num_mel_bins": 16, "max_source_positions": 64}


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Reset accelerate's state, which is global to the process and includes the precision."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("config", [T5, BART | {"model_type": "bart"}, WHISPER], ids=["t5", "bart", "whisper"])
def test_few_layers_of_both_stacks_tell_the_peak_of_any_depth(config: dict[str, Any], method: str) -> None:
    words = ["--config", "x", "--method", method, "--seq", "64", "--gradient-checkpointing"]
    ask = memtrace_main.options(memtrace_main.parser().parse_args(words), config["model_type"])
    whole = {name: sum(by.values()) for name, by in trace(config, (6, 5), ask).items()}
    AcceleratorState._reset_state(True)
    assert extrapolate(config, ask).peak_allocated_bytes == max(whole.values())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BART | {"model_type": "bart"}, ["--method", "full", "--gradient-checkpointing"]),
        (BART | {"model_type": "bart"}, ["--method", "lora", "--attention", "eager"]),
        (T5, ["--method", "full", "--gradient-checkpointing"]),  # a bias that is learned, and dropout
        (T5 | {"dropout_rate": 0.0}, ["--method", "full", "--precision", "fp32"]),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else given["model_type"],
)
def test_the_trace_of_two_stacks_equals_torchs_allocations(config: dict[str, Any], words: list[str]) -> None:
    words = ["--config", "x", "--seq", "48", "--target-seq", "32", "--device", "cpu", *words]
    ask = memtrace_main.options(memtrace_main.parser().parse_args(words), config["model_type"])
    traced = trace(config, (3, 3), ask)
    AcceleratorState._reset_state(True)
    real = trace(config, (3, 3), ask, real=True)
    worst = max(real, key=lambda name: sum(real[name].values()))
    assert max(traced, key=lambda name: sum(traced[name].values())) == worst
    for name in (worst, *(n for n in real if n.startswith("backward"))):
        by = real[name]
        assert sum(traced[name].values()) == pytest.approx(sum(by.values()), rel=0.01), name


def test_an_extra_head_of_a_checkpoint_is_no_table_of_words() -> None:
    words = ["--config", "x", "--method", "full", "--seq", "16"]
    ask = memtrace_main.options(memtrace_main.parser().parse_args(words), "t5")
    tied = trace(T5, (1, 1), ask)
    AcceleratorState._reset_state(True)
    untied = trace(T5 | {"tie_word_embeddings": False}, (1, 1), ask)
    more = untied["optimizer"]["weights"] - tied["optimizer"]["weights"]
    assert more == 4 * 500 * 64
