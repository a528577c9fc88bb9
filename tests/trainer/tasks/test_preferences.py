"""DPO with the base as its reference, and reward models: losses as in the papers, and bitwise resume."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from broker.preflight import dataset as daemon
from tests.trainer.batching.test_chats import TEMPLATE, turn
from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer import tasks
from trainer.batching.examples import IGNORED
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.errors import DataFault
from trainer.dataset.chats import Chat
from trainer.tasks.common import answer_spans, chat_template
from trainer.tasks.text.dpo import Dpo
from trainer.tasks.text.preference_pairs import PreferenceData
from trainer.tasks.text.reward_model import RewardModel

CPU = torch.device("cpu")
DPO: dict[str, Any] = {
    "task": "dpo", "method": LoraConfig(r=8, dropout=0.1), "dpo": {"beta": 0.5}, "optim": OptimConfig(lr=3e-2),
    "max_steps": 16, "samples": SamplesConfig(prompts=("w30",), max_new_tokens=2),
}  # fmt: skip
REWARD: dict[str, Any] = {
    "task": "reward_model", "method": LoraConfig(r=4, dropout=0.1), "optim": OptimConfig(lr=1e-2), "max_steps": 12,
    "samples": SamplesConfig(prompts=("w30 w5", "w30 w50 w9")),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return pairs in which w5 and w6 are preferred to w50 and w51; answers differ in length."""
    lines = ["q,good,bad", *(f"w{30 + i % 7},w{5 + i % 2},w{50 + i % 2} w9" for i in range(40))]
    path = tmp_path / "preferences.csv"
    path.write_text("\n".join(lines))
    return path


def config(folder: Path, kind: dict[str, Any], **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "model": str(folder), "global_batch": 12, "micro_batch": 3, "max_length": 16,
        "data": {"path": "p.csv", "prompt": "{q} ", "chosen": "{good}", "rejected": "{bad}", "eval_share": 0.2},
    }  # fmt: skip
    return TrainConfig.model_validate(fields | kind | changes)


def test_resume_bitwise_of_preferences(model: Path, data: Path, tmp_path: Path) -> None:
    calm = workers.finished(tmp_path / "calm", config(model, DPO), data)
    rough = workers.resumed(tmp_path / "rough", config(model, DPO), data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores["heldout_loss_before"] == pytest.approx(math.log(2), rel=1e-4), "it begins as its own reference"
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert scores["metrics_after"]["accuracy"] > 0.7
    assert scores["metrics_after"]["margin"] > 0


def test_a_merged_model_of_dpo_is_compared_with_its_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    """A merged model has no adapter to turn off, so there is no reference to compare by."""
    task = Dpo(config(model, DPO, precision="fp32", method=LoraConfig(r=4, dropout=0)))
    examples, _ = task.examples(data, "csv")
    tuned = task.model.build("fp32")
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    task.model.save(tmp_path, tuned)
    compared = task.model.merge(tmp_path, list(examples)[:4])
    assert compared["merged_loss"] == pytest.approx(compared["adapter_loss"], rel=1e-4)
    assert compared["merged_loss"] > 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_the_loss_of_dpo_is_that_of_the_paper(model: Path, data: Path) -> None:
    task = Dpo(config(model, DPO, precision="fp32", method=LoraConfig(r=4, dropout=0)))
    examples, _ = task.examples(data, "csv")
    torch.manual_seed(5)
    tuned = task.model.build("fp32").train()
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def log_probability(ids: list[int], prompt: int) -> float:
        logits = tuned(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logits[at - 1, ids[at]]) for at in range(prompt, len(ids)))

    expected = 0.0
    for pair in examples[:3]:
        answers = (pair.chosen, pair.rejected)
        now = [log_probability(e.ids, e.prompt) for e in answers]
        with tuned.disable_adapter():
            before = [log_probability(e.ids, e.prompt) for e in answers]
        margin = (now[0] - before[0]) - (now[1] - before[1])
        expected += math.log1p(math.exp(-0.5 * margin))
    found = task.model.loss_sum(tuned, task.data.collate(examples[:3], CPU))
    assert float(found) == pytest.approx(expected, rel=1e-4)
    found.backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)


def test_a_full_fine_tune_has_no_reference(model: Path) -> None:
    with pytest.raises(ValidationError, match="dpo trains a LoRA"):
        config(model, DPO, method={"kind": "full"})


@pytest.mark.parametrize("method", [LoraConfig(r=4, dropout=0.1), FullConfig()], ids=["lora", "full"])
def test_resume_bitwise_of_rewards(method: Any, model: Path, data: Path, tmp_path: Path) -> None:
    train = config(model, REWARD, method=method)
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert scores["metrics_after"]["accuracy"] == 1
    assert scores["metrics_after"]["margin"] > scores["metrics_before"]["margin"]
    good, bad = (float(s["tuned"]) for s in json.loads((calm / "samples.json").read_text()))
    assert good > bad


def test_the_loss_is_minus_the_log_probability_that_the_better_one_wins(model: Path, data: Path) -> None:
    task = RewardModel(config(model, REWARD, precision="fp32", method=FullConfig()))
    examples, _ = task.examples(data, "csv")
    tuned = task.model.build("fp32").eval()

    def reward(ids: list[int]) -> float:
        """Return the reward of one text alone, without padding."""
        with torch.no_grad():
            hidden = tuned.model(input_ids=torch.tensor([ids])).last_hidden_state
            return float((hidden @ tuned.score.weight.T)[0, -1, 0])

    expected = sum(math.log1p(math.exp(reward(pair.rejected.ids) - reward(pair.chosen.ids))) for pair in examples[:5])
    assert float(task.model.loss_sum(tuned, task.data.collate(examples[:5], CPU))) == pytest.approx(expected, rel=1e-4)


def test_an_adapter_with_its_head_gives_the_rewards_that_were_learned(model: Path, data: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    done = workers.finished(tmp_path / "run", config(model, REWARD, precision="fp32", max_steps=4), data)
    torch.manual_seed(99)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    base.config.pad_token_id = 0
    tuned = PeftModel.from_pretrained(base, done / "adapter").eval()
    tokens = AutoTokenizer.from_pretrained(model)("w30 w5 <eos>", return_tensors="pt")
    with torch.no_grad():
        found = float(tuned(input_ids=tokens["input_ids"]).logits[0, 0])
    assert json.loads((done / "samples.json").read_text())[0]["tuned"] == f"{found:.4g}"


USER, BETTER, WORSE = turn("user", "w30"), turn("assistant", "w5"), turn("assistant", "w50 w9")
EARLIER = [turn("user", "w40"), turn("assistant", "w41")]


def chatty(model: Path, folder: Path) -> tuple[Path, Any]:
    """Return the model with a chat template, and its tokenizer."""
    made = shutil.copytree(model, folder / "chatty")
    tokenizer = heads.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made, tokenizer


@pytest.mark.parametrize("task", [DPO, REWARD])
@pytest.mark.parametrize(
    ("prompt", "rows"),
    [
        ("", {"good": [*EARLIER, USER, BETTER], "bad": [*EARLIER, USER, WORSE]}),
        ("{q}", {"q": [*EARLIER, USER], "good": [BETTER], "bad": [WORSE]}),
        ("w{n}", {"n": 30, "good": [BETTER], "bad": [WORSE]}),
    ],
    ids=["whole", "messages", "text"],
)
def test_answers_of_a_chat_are_its_last_turns(
    task: dict[str, Any], prompt: str, rows: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    made, tokenizer = chatty(model, tmp_path)
    text = "\n".join([json.dumps(rows)] * 3)
    (tmp_path / "rows.jsonl").write_text(text)
    data = {"path": "rows.jsonl", "prompt": prompt, "chosen": "{good}", "rejected": "{bad}"}
    train = config(made, task, data=data, max_length=64, global_batch=1, micro_batch=1)
    trained = tasks.build_task(train)
    first = trained.examples(tmp_path / "rows.jsonl", "jsonl")[0][0]
    chat = Chat(messages=[*(EARLIER if "n" not in rows else []), USER])
    before = answer_spans.render(tokenizer, chat, ask=True)
    for example, answer in ((first.chosen, "w5 <eos>"), (first.rejected, "w50 w9 <eos>")):
        assert tokenizer.decode(example.ids) == f"{tokenizer.decode(tokenizer(before).input_ids)} {answer}"
        assert tokenizer.decode([i for i in example.labels if i != IGNORED]) == answer, "the last answer alone"
    assert isinstance(trained.data, PreferenceData)
    assert trained.data.has_chats
    assert daemon.check(train, daemon.summarise(text.encode(), "jsonl")).rows == 3


def test_a_system_column_precedes_the_prompt_of_a_preference(model: Path, tmp_path: Path) -> None:
    row = {"q": [USER], "good": [BETTER], "bad": [WORSE], "system": "w7", "id": 3}
    own = {**row, "q": [{"role": "system", "content": "w8"}, USER]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [row, own, row])))
    data = {"path": "rows.jsonl", "prompt": "{q}", "chosen": "{good}", "rejected": "{bad}"}
    folder, tokenizer = chatty(model, tmp_path)
    trained = tasks.build_task(config(folder, DPO, data=data))
    examples, _ = trained.examples(tmp_path / "rows.jsonl", "jsonl")
    with_system, with_own = (tokenizer.decode(example.chosen.ids) for example in examples[:2])
    assert "w7" in with_system
    assert "w8" in with_own
    assert "w7" not in with_own
    notices = "; ".join(trained.data.reader.notice_lines())
    assert "in 3 of 3 rows the column 'id' is not used" in notices
    assert "in 1 of 3 rows 'system' in the row is not used" in notices
    assert "'q'" not in notices
    assert "'bad'" not in notices


def test_chats_that_are_no_answers_are_bad_rows(model: Path, tmp_path: Path) -> None:
    rows = [
        {"q": "w1", "good": [USER, BETTER], "bad": [USER, WORSE]},
        {"q": "w1", "good": [BETTER], "bad": "w3"},
        {"q": "w1", "good": [BETTER], "bad": [USER]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": "rows.jsonl", "prompt": "{q}", "chosen": "{good}", "rejected": "{bad}"}
    trained = tasks.build_task(config(chatty(model, tmp_path)[0], DPO, data=data))
    with pytest.raises(DataFault):
        trained.examples(tmp_path / "rows.jsonl", "jsonl")
    assert [fault.split(": ")[0] for fault in trained.data.reader.faults] == [f"rows.jsonl row {n}" for n in (1, 2, 3)]
    whole, mixed, asking = trained.data.reader.faults
    assert "column 'good' begins with the question, which data.prompt holds too; remove one of them" in whole
    assert "column 'good' is neither text" in mixed
    assert "column 'bad' has no message of the assistant" in asking


def test_what_a_pair_gives_and_the_template_ignores_is_counted(model: Path, tmp_path: Path) -> None:
    row = {"good": json.dumps([USER, BETTER | {"mood": "x"}]), "bad": [USER, WORSE], "tools": [{"name": "tide"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    data = {"path": "rows.jsonl", "chosen": "{good}", "rejected": "{bad}"}
    trained = tasks.build_task(config(chatty(model, tmp_path)[0], DPO, data=data, max_length=64))
    trained.examples(tmp_path / "rows.jsonl", "jsonl")
    lines = trained.data.reader.notice_lines()
    for part in ("tools in the row is not used", "the key 'mood' of messages is not used", "JSON text is read as"):
        assert [line for line in lines if line.startswith("rows.jsonl: in 3 of 3 rows") and part in line], part


def test_pairs_of_other_tools_are_read(model: Path, tmp_path: Path) -> None:
    """OpenAI's pairs have the question and its tools in one cell; LLaMA-Factory's have one message as an answer."""
    tools = [{"type": "function", "function": {"name": "w9"}}]
    rows = [
        {"q": {"messages": [USER], "tools": tools, "parallel_tool_calls": True}, "good": [BETTER], "bad": [WORSE]},
        {"q": [{"from": "human", "value": USER["content"]}], "good": {"from": "gpt", "value": BETTER["content"]},
         "bad": {"from": "gpt", "value": WORSE["content"]}},
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "rows.jsonl").write_text(text)
    data = {"path": "rows.jsonl", "prompt": "{q}", "chosen": "{good}", "rejected": "{bad}"}
    folder, tokenizer = chatty(model, tmp_path)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    tokenizer.save_pretrained(folder)
    train = config(folder, DPO, data=data, max_length=64, global_batch=1, micro_batch=1)
    trained = tasks.build_task(train)
    examples, _ = trained.examples(tmp_path / "rows.jsonl", "jsonl")
    with_tools, without = (tokenizer.decode(example.chosen.ids) for example in examples)
    assert with_tools.replace("w9 ", "", 1) == without
    assert with_tools != without
    notices = "; ".join(trained.data.reader.notice_lines())
    assert "in 1 of 2 rows the key 'parallel_tool_calls' next to the messages is not used" in notices
    assert "in 1 of 2 rows one message is read as a list of one" in notices
    assert daemon.check(train, daemon.summarise(text.encode(), "jsonl")).rows == 2


def test_a_model_that_learns_from_chats_is_asked_as_in_one(model: Path, tmp_path: Path) -> None:
    made, _ = chatty(model, tmp_path)
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([json.dumps({"good": [USER, BETTER], "bad": [USER, WORSE]})] * 6))
    templates = {"path": "rows.jsonl", "chosen": "{good}", "rejected": "{bad}", "eval_share": 0.3}
    train = config(made, DPO, data=templates, global_batch=2, micro_batch=1, max_steps=60, max_length=32)
    done = workers.finished(tmp_path / "run", train, data)
    assert json.loads((done / "eval.json").read_text())["metrics_after"]["accuracy"] == 1.0
    trained = tasks.build_task(train)
    trained.examples(data, "jsonl")
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "trainer.tasks.common.generation.continuations", lambda m, t, s, d, prompts, special: asked.extend(prompts)
        )
        trained.samples.write(None, CPU)
    assert asked == [chat_template.render_question(trained.data.tokenizer, "w30")]
