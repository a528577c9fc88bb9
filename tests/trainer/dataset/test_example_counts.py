"""Numbers of examples: the daemon's summary, the preflight and the trainer count the same."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.errors import InvalidInput
from broker.domain.spec import JobSpec
from broker.estimator.workload import workload
from broker.preflight import dataset as daemon
from tests.trainer.support.tokenizers import byte_level
from trainer import preflight, tasks
from trainer.batching import sampler
from trainer.contract.train import TrainConfig
from trainer.dataset import batch_defaults, example_counts
from trainer.optim import learning_rates

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(answers: int, *, muted: tuple[int, ...] = (), name: str = "") -> list[dict[str, Any]]:
    """Return a chat whose answers get longer."""
    messages: list[dict[str, Any]] = []
    for number in range(answers):
        messages.append({"role": "user", "content": f"What is {name} number {number}?"})
        messages.append({"role": "assistant", "content": f"It is {name}. " * (number + 1)})
        if number in muted:
            messages[-1]["weight"] = 0
    return messages


CHATS = [
    *(chat(3, name=f"a{n}") for n in range(12)),
    *(chat(1, name=f"b{n}") for n in range(7)),
    *(chat(5, muted=(1, 4), name=f"c{n}") for n in range(6)),
    chat(2, muted=(0, 1), name="d"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("split") / "model"
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    return folder


def config(model: Path, folder: Path, learn: str, **changes: Any) -> TrainConfig:
    """Return a configuration over CHATS, and write its file of rows and itself to the folder."""
    (folder / "chats.jsonl").write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in CHATS))
    data = {"path": "chats.jsonl", "messages": "chat", "learn": learn, "eval_share": 0.2}
    train = {"model": str(model), "data": data, "max_length": 1024, "global_batch": 4, "epochs": 3} | changes
    (folder / "train.json").write_text(json.dumps(train))
    return TrainConfig.model_validate(train)


@pytest.mark.parametrize(("learn", "examples"), [("all", 25), ("last", 19), ("split", 61)])
def test_the_daemon_counts_what_the_trainer_trains(model: Path, tmp_path: Path, learn: str, examples: int) -> None:
    train = config(model, tmp_path, learn)
    summary = daemon.summarise(tmp_path / "chats.jsonl", "jsonl")
    stored = daemon.DataSummary.model_validate_json(summary.model_dump_json())
    report, rows = daemon.check(train, stored), daemon.rows_of(train, stored)
    free = preflight.check(tmp_path / "train.json")
    task = tasks.build_task(train)
    found, _ = task.examples(tmp_path / "chats.jsonl", "jsonl")
    training, held = sampler.split(train.seed, len(found), train.data.eval_share, task.data.chats)
    steps = learning_rates.total_steps(train, len(training))

    assert free.problem is None
    assert len(found) == rows.count == examples
    assert (len(training), len(held)) == (report.train_rows, report.heldout_rows)
    assert (free.train_rows, free.heldout_rows, free.steps) == (len(training), len(held), steps)
    spec = JobSpec.model_validate(
        {"name": "split", "cap_usd": "1", "train": json.loads((tmp_path / "train.json").read_text())}
    )
    assert workload(spec, None, rows).steps == steps == math.ceil(3 * len(training) / 4)
    assert example_counts.count_summary(json.loads(summary.model_dump_json()), train.data).training == len(training)
    assert example_counts.count_file(tmp_path / "chats.jsonl", "jsonl", train.data).training == len(training)


def test_the_daemons_tokens_grow_with_split_as_the_trainers(model: Path, tmp_path: Path) -> None:
    totals = []
    for learn in ("all", "split"):
        train = config(model, tmp_path, learn)
        summary = daemon.summarise(tmp_path / "chats.jsonl", "jsonl")
        free = preflight.check(tmp_path / "train.json")
        totals.append((daemon.check(train, summary).tokens_total, free.tokens_per_epoch))
    (daemon_all, trainer_all), (daemon_split, trainer_split) = totals
    assert trainer_split > 1.5 * trainer_all
    assert daemon_split / daemon_all == pytest.approx(trainer_split / trainer_all, rel=0.1)


def test_a_batch_of_auto_is_one_of_daemon_and_preflight(model: Path, tmp_path: Path) -> None:
    train = config(model, tmp_path, "split", global_batch="auto")
    summary = json.loads(daemon.summarise(tmp_path / "chats.jsonl", "jsonl").model_dump_json())
    rows = example_counts.count_summary(summary, train.data)
    _, message = batch_defaults.resolve_global_batch(train, rows)
    assert preflight.check(tmp_path / "train.json").settled == message


def test_chats_without_an_answer_to_learn_are_refused_before_a_purchase(model: Path, tmp_path: Path) -> None:
    train = config(model, tmp_path, "last")
    row = {"chat": chat(2, muted=(1,))}
    with pytest.raises(InvalidInput, match=r"data.learn: last selects is muted"):
        daemon.check(train, daemon.summarise(json.dumps([row] * 9).encode(), "json"))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    share=st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.9]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_whole_chats_are_held_out(sizes: list[int], share: float, seed: int) -> None:
    chats = [number for number, size in enumerate(sizes, 1) for _ in range(size)]
    training, held = sampler.split(seed, len(chats), share, chats)
    assert sorted([*training, *held]) == list(range(len(chats)))
    assert not {chats[n] for n in training} & {chats[n] for n in held}
    by_size = {size: sizes.count(size) for size in sizes}
    expected = example_counts.count_chats(by_size, share)
    assert (len(training), len(held)) == (expected.training, expected.held_out)
    assert bool(held) == (share > 0 and len(sizes) > 1)
    assert training
