"""ORPO on preference pairs and KTO on rated answers: losses as in the papers, and bitwise resume."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from broker.domain.errors import InvalidInput
from broker.preflight import dataset as daemon
from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from tests.trainer.tasks.test_preferences import BETTER, USER, WORSE, chatty
from trainer import tasks
from trainer.batching.examples import IGNORED
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.errors import DataFault, UserFault
from trainer.tasks.text.kto import Kto, RatedAnswer
from trainer.tasks.text.orpo import Orpo, log_odds
from trainer.tasks.text.preference_pairs import shared_start

CPU = torch.device("cpu")
ORPO: dict[str, Any] = {
    "task": "orpo", "method": LoraConfig(r=8, dropout=0.1), "orpo": {"beta": 0.5}, "optim": OptimConfig(lr=3e-2),
    "data": {"path": "p.csv", "prompt": "{q} ", "chosen": "{good}", "rejected": "{bad}", "eval_share": 0.2},
}  # fmt: skip
KTO: dict[str, Any] = {
    "task": "kto", "method": LoraConfig(r=8, dropout=0.1), "optim": OptimConfig(lr=3e-2),
    "kto": {"beta": 0.5, "undesirable_weight": 1.5},
    "data": {"path": "p.csv", "prompt": "{q} ", "completion": "{answer}", "label": "liked", "eval_share": 0.2},
}  # fmt: skip
EXACT: dict[str, Any] = {"precision": "fp32", "method": LoraConfig(r=4, dropout=0)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Return pairs in which w5 and w6 are preferred to w50 and w51; answers differ in length."""
    lines = ["q,good,bad", *(f"w{30 + i % 7},w{5 + i % 2},w{50 + i % 2} w9" for i in range(40))]
    path = tmp_path / "pairs.csv"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    """Return answers of which w5 and w6 are liked, w50 and w51 are not."""
    answers = [("w5", "true"), ("w50 w9", "false"), ("w6", "1"), ("w51", "False")]
    lines = ["q,answer,liked", *(f"w{30 + i % 7},{','.join(answers[i % 4])}" for i in range(40))]
    path = tmp_path / "rated.csv"
    path.write_text("\n".join(lines))
    return path


def config(folder: Path, kind: dict[str, Any], **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "model": str(folder), "global_batch": 12, "micro_batch": 3, "max_length": 16, "max_steps": 16,
        "samples": SamplesConfig(prompts=("w30",), max_new_tokens=2),
    }  # fmt: skip
    return TrainConfig.model_validate(fields | kind | changes)


def shaken(task: Any, seed: int = 5) -> Any:
    """Return the task's model with adapters that are not zero."""
    torch.manual_seed(seed)
    tuned = task.model.build("fp32").train()
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return tuned


def log_probabilities(model: Any, ids: list[int], start: int) -> list[float]:
    """Return the log-probability of each token from `start` on, of one row without padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logits[at - 1, ids[at]]) for at in range(max(1, start), len(ids))]


def test_resume_bitwise_of_orpo(model: Path, pairs: Path, tmp_path: Path) -> None:
    """ORPO needs no adapters, because it has no reference."""
    train = config(model, ORPO, method=FullConfig(), optim=OptimConfig(lr=1e-2))
    calm = workers.finished(tmp_path / "calm", train, pairs)
    rough = workers.resumed(tmp_path / "rough", train, pairs)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert scores["metrics_after"]["accuracy"] == 1
    assert scores["metrics_after"]["log_odds_ratio"] > 0


def test_resume_bitwise_of_kto(model: Path, rated: Path, tmp_path: Path) -> None:
    train = config(model, KTO)
    calm = workers.finished(tmp_path / "calm", train, rated)
    rough = workers.resumed(tmp_path / "rough", train, rated)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert 0.5 <= scores["heldout_loss_before"] <= 0.75, "half of the weights 1 and 1.5: it is its own reference"
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert scores["metrics_after"]["accuracy"] > 0.8
    assert scores["metrics_after"]["margin"] > 0


def test_the_loss_of_orpo_is_that_of_the_paper(model: Path, pairs: Path) -> None:
    task = Orpo(config(model, ORPO, **EXACT))
    examples, _ = task.examples(pairs, "csv")
    tuned, expected = shaken(task), 0.0
    for pair in examples[:3]:
        text = log_probabilities(tuned, pair.chosen.ids, 1)
        means = [
            sum(each) / len(each)
            for each in (log_probabilities(tuned, e.ids, e.prompt) for e in (pair.chosen, pair.rejected))
        ]
        odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
        expected += -sum(text) / len(text) + 0.5 * math.log1p(math.exp(odds[1] - odds[0]))
    loss = task.model.loss_sum(tuned, task.data.collate(examples[:3], CPU))
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)


def test_odds_of_a_certain_answer_have_a_finite_gradient() -> None:
    means = torch.tensor([0.0, -1e-9, -0.5, -100.0], requires_grad=True)
    odds = log_odds(means)
    odds.sum().backward()
    assert means.grad is not None
    assert bool(means.grad.isfinite().all())
    assert odds.tolist()[2:] == pytest.approx([-0.5 - math.log(1 - math.exp(-0.5)), -100.0], rel=1e-5)


@pytest.mark.parametrize(
    ("better", "worse", "start"),
    [
        ("Human: hi\nAssistant: hello", "Human: hi\nAssistant: no", "Human: hi\nAssistant:"),
        ("so", "so far", "s"),
        ("yes", "no", ""),
        ("same", "same", ""),
        ("", "x", ""),
    ],
)
def test_the_start_that_two_answers_share_is_their_prompt(better: str, worse: str, start: str) -> None:
    assert shared_start(better, worse) == shared_start(worse, better) == start


@pytest.mark.parametrize("task", ["orpo", "dpo", "reward_model"])
def test_dialogues_without_a_prompt_are_learned_from_the_first_difference(
    task: str, model: Path, tmp_path: Path
) -> None:
    """The rows have the form of HH-RLHF; a reward model reads the whole text."""
    (tmp_path / "p.csv").write_text("good,bad\nw1 w2 w5,w1 w2 w50 w9\n")
    data = {"path": "p.csv", "chosen": "{good}", "rejected": "{bad}"}
    pair = tasks.build_task(config(model, ORPO, task=task, data=data)).examples(tmp_path / "p.csv", "csv")[0][0]
    assert (len(pair.chosen.ids), len(pair.rejected.ids)) == (4, 5)
    assert {pair.chosen.prompt, pair.rejected.prompt} == ({0} if task == "reward_model" else {2})


def test_the_loss_of_kto_is_that_of_the_paper(model: Path, rated: Path) -> None:
    """Each prompt gets the answer to the one before it in the step, for the reference point."""
    task = Kto(config(model, KTO, **EXACT))
    examples, _ = task.examples(rated, "csv")
    tuned = shaken(task, seed=1)
    (step,) = task.data.micro_batches(examples[:4], 4)

    def gain(ids: list[int], prompt: int) -> float:
        now = sum(log_probabilities(tuned, ids, prompt))
        with tuned.disable_adapter():
            return now - sum(log_probabilities(tuned, ids, prompt))

    def mixed(row: RatedAnswer, other: RatedAnswer) -> list[int]:
        return row.answer.ids[: row.answer.prompt] + other.answer.ids[other.answer.prompt :]

    others = [step[-1], *step[:-1]]
    drifts = [gain(mixed(row, other), row.answer.prompt) for row, other in zip(step, others, strict=True)]
    point, expected = sum(drifts) / len(drifts), 0.0
    assert point > 0.01, "a negative one counts as 0"
    for row in step:
        value = gain(row.answer.ids, row.answer.prompt) - point
        weight, sign = (1.0, 1) if row.good else (1.5, -1)
        expected += weight * (1 - 1 / (1 + math.exp(-0.5 * sign * value)))
    loss = task.model.loss_sum(tuned, task.data.collate(step, CPU))
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert {row.good for row in step} == {True, False}
    loss.backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)


def test_a_prompt_with_another_answer_keeps_the_limit(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("q,answer,liked\nw1 w2 w3 w4 w5,w6,1\nw7,w8 w9 w10 w11 w12,0\n")
    task = Kto(config(model, KTO, max_length=8, global_batch=2, micro_batch=2))
    examples, _ = task.examples(tmp_path / "rows.csv", "csv")
    (step,) = task.data.micro_batches(examples, 2)
    batch = task.data.collate(step, CPU)
    assert batch["other_input_ids"].shape[1] == 8
    learned = (batch["other_labels"] != IGNORED).sum(1).tolist()
    assert sorted(learned) == [2, 3], "an answer of one word and EOS, and one that is cut"


def test_a_merged_model_of_kto_is_compared_with_its_adapter(model: Path, rated: Path, tmp_path: Path) -> None:
    task = Kto(config(model, KTO, **EXACT))
    examples, _ = task.examples(rated, "csv")
    task.model.save(tmp_path, shaken(task))
    compared = task.model.merge(tmp_path, list(examples)[:4])
    assert compared["merged_loss"] == pytest.approx(compared["adapter_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (KTO, {"method": {"kind": "full"}}, "method: kto trains a LoRA, since the model under its adapters is the"),
        (KTO, {"data": {"path": "p.csv", "completion": "{answer}"}}, "task kto needs data.completion and data.label"),
        (ORPO, {"data": {"path": "p.csv", "chosen": "{a}"}}, "task orpo needs data.chosen and data.rejected"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    kind: dict[str, Any], changes: dict[str, Any], words: str, model: Path
) -> None:
    with pytest.raises(ValidationError, match=words):
        config(model, kind, **changes)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (("good", "0"), "row 1: column 'liked' is neither true nor false; write true for a good answer, false for a"),
        (("1", "true"), "column 'liked' is true in every row; give good answers and bad ones"),
        (("0", "0"), "column 'liked' is false in every row; give good answers and bad ones"),
    ],
)
def test_daemon_and_trainer_refuse_ratings_alike(
    cells: tuple[str, str], words: str, model: Path, tmp_path: Path
) -> None:
    text = "q,answer,liked\n" + "".join(f"w1,w{n},{cell}\n" for n, cell in enumerate(cells, 2))
    (tmp_path / "p.csv").write_text(text)
    train = config(model, KTO, global_batch=2, micro_batch=1)
    with pytest.raises(DataFault, match=words):
        Kto(train).examples(tmp_path / "p.csv", "csv")
    with pytest.raises(InvalidInput, match=words):
        daemon.check(train, daemon.summarise(text.encode(), "csv"))


@pytest.mark.parametrize(("good", "bad"), [(3, 1), (1, 3), (40, 3)])
def test_unbalanced_ratings_are_noticed_and_the_advice_works(good: int, bad: int, model: Path, tmp_path: Path) -> None:
    """The advice is that of TRL's documentation: the weights of good answers are 1 to 4/3 of those of bad ones."""
    lines = ["q,answer,liked", *(f"w{n % 50},w5,{int(n < good)}" for n in range(good + bad))]
    path = tmp_path / "p.csv"
    path.write_text("\n".join(lines) + "\n")

    def notices(**weights: float) -> list[str]:
        train = config(model, KTO, global_batch=2, micro_batch=1, kto=weights)
        task = Kto(train)
        task.examples(path, "csv")
        lines = [line.split(" rows ", 1)[1] for line in task.data.reader.notice_lines()]
        report = daemon.check(train, daemon.summarise(path.read_bytes(), "csv"))
        assert [line for line in report.warnings if "answers are good" in line] == lines
        return lines

    (advice,) = notices()
    if (good, bad) == (3, 1):
        assert "set kto.desirable_weight from 0.333 to 0.444, or kto.undesirable_weight from 2.25 to 3" in advice
    assert advice.startswith(f"{good} answers are good and {bad} are bad, and their weights differ by the factor")
    bounds = re.findall(r"kto\.(\w+) from (\S+) to ([\d.]+)", advice)
    assert [name for name, *_ in bounds] == ["desirable_weight", "undesirable_weight"]
    for name, low, high in bounds:
        for value in (float(low), float(high)):
            assert not notices(**{name: value})
        assert notices(**{name: float(high) * 1.1})
        assert notices(**{name: float(low) / 1.1})


def test_equal_numbers_of_ratings_need_no_advice(model: Path, rated: Path) -> None:
    task = Kto(config(model, KTO))
    task.examples(rated, "csv")
    assert not task.data.reader.notice_lines()


def test_a_step_of_one_answer_is_refused(model: Path, rated: Path) -> None:
    train = config(model, KTO, global_batch=1, micro_batch=1)
    with pytest.raises(UserFault, match="global_batch: kto compares the answers of a step with each other; give at"):
        Kto(train).examples(rated, "csv")
    with pytest.raises(InvalidInput, match="global_batch: kto compares the answers of a step with each other"):
        daemon.check(train, daemon.summarise(rated.read_bytes(), "csv"))


def test_ratings_of_json_and_chats_are_read(model: Path, tmp_path: Path) -> None:
    made, tokenizer = chatty(model, tmp_path)
    rows = [
        {"prompt": [USER], "completion": [BETTER], "label": True},
        {"prompt": [USER], "completion": [WORSE], "label": False},
    ]
    text = "\n".join(map(json.dumps, rows * 2))
    (tmp_path / "rows.jsonl").write_text(text)
    data = {"path": "rows.jsonl", "prompt": "{prompt}", "completion": "{completion}", "label": "label"}
    train = config(made, KTO, data=data, max_length=64, global_batch=2, micro_batch=1)
    task = tasks.build_task(train)
    examples, _ = task.examples(tmp_path / "rows.jsonl", "jsonl")
    learned = [tokenizer.decode([i for i in row.answer.labels if i != IGNORED]) for row in examples]
    assert learned == ["w5 <eos>", "w50 w9 <eos>"] * 2
    assert [row.good for row in examples] == [True, False] * 2
    assert task.samples.describe(examples[1])[1] == "bad: w50 w9 <eos>"
    assert not task.data.reader.notice_lines()
    report = daemon.check(train, daemon.summarise(text.encode(), "jsonl"))
    assert (report.rows, report.labels) == (4, ())
