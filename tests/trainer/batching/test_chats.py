"""Loss of chats covers the assistant's turns, and no row of a packed sequence attends to another row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import workers
from trainer.batching.examples import IGNORED, Example
from trainer.contract.data_config import DataConfig
from trainer.contract.train import LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.errors import DataFault, UserFault
from trainer.dataset.chats import Chat
from trainer.tasks.common import chat_template as chats
from trainer.tasks.common import packing
from trainer.tasks.text.causal_lm import CausalLm

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETS = "{{ messages[-1].content }}{% if add_generation_prompt %} <assistant>{% endif %}"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="session")
def chat_models(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the tiny models with a chat template, GPT-2 without dropout."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = {}
    for name, folder in tiny_models.items():
        made[name] = tmp_path_factory.mktemp("chat") / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<system>", "<user>", "<assistant>"]})
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(made[name])
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="session")
def tokenizer(chat_models: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_models["lora"])


def config(folder: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "model": str(folder), "data": DataConfig(path="chats.jsonl", messages="chat", eval_share=0.1),
        "method": LoraConfig(r=4, dropout=0.2), "optim": OptimConfig(lr=1e-3), "max_steps": 8, "global_batch": 12,
        "micro_batch": 2, "max_length": 32, "samples": SamplesConfig(prompts=("w1",), max_new_tokens=3),
    }  # fmt: skip
    return TrainConfig(**fields | changes)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        {
            "chat": [
                turn("user", f"w{i} w{i + 1}"),
                turn("assistant", " ".join(f"w{i + j}" for j in range(1 + i % 5))),
                *([turn("user", "w7"), turn("assistant", f"w{i}")] if i % 3 == 0 else []),
            ]
        }
        for i in range(40)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_loss_covers_the_assistants_turns(tokenizer: Any) -> None:
    messages = [turn("system", "w9"), turn("user", "w0 w1"), turn("assistant", "w2"), turn("user", "w3")]
    messages += [turn("assistant", "w4 w5"), turn("user", "w6")]
    example = chats.encode(tokenizer, Chat(messages=messages), 64, "row 1")
    told = [tokenizer.convert_ids_to_tokens(i) if i != IGNORED else "-" for i in example.labels]
    assert " ".join(told) == "- - - - - - - - w2 <eos> - - - - w4 w5 <eos>", "what follows the last answer is left out"
    assert example.targets == 5
    cut = chats.encode(tokenizer, Chat(messages=messages), 12, "row 1")
    assert (len(cut.ids), cut.targets) == (12, 2)
    assert cut.labels == example.labels[:12]


def test_template_that_hides_an_answer_leaves_the_last_one(tokenizer: Any) -> None:
    """FORGETS renders the last message alone, so that no other message can be learned; the user gets the reason."""
    messages = [turn("user", "w0"), turn("assistant", "w1"), turn("user", "w2"), turn("assistant", "w3")]
    notices: list[str] = []
    kept, tokenizer.chat_template = tokenizer.chat_template, FORGETS
    try:
        example = chats.encode(tokenizer, Chat(messages=messages), 64, "row 7", notice=notices.append)
    finally:
        tokenizer.chat_template = kept
    assert tokenizer.decode([i for i in example.labels if i != IGNORED]) == "w3"
    assert ["only the last answer is learned" in notice for notice in notices] == [True]


def test_a_row_that_is_no_chat_is_named_by_file_and_row(chat_models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    good = json.dumps({"chat": [turn("user", "w1"), turn("assistant", "w2")]})
    path.write_text(good + "\n" + json.dumps({"chat": [turn("user", "w1")]}))
    with pytest.raises(DataFault, match=r"^chats\.jsonl row 2: column 'chat' has no message of the assistant"):
        CausalLm(config(chat_models["lora"])).examples(path, "jsonl")


@pytest.mark.parametrize("learn", ["all", "last", "split"])
def test_a_data_set_of_muted_answers_is_named(learn: str, chat_models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"chat": [turn("user", "w1"), turn("assistant", "w2") | {"weight": 0}]}))
    task = CausalLm(config(chat_models["lora"], data={"path": "chats.jsonl", "messages": "chat", "learn": learn}))
    with pytest.raises(DataFault, match=r"chats\.jsonl: no row has an answer to learn: in 1 of 1 rows .* is muted"):
        task.examples(path, "jsonl")


def test_a_model_without_a_chat_template_is_refused(tiny_models: dict[str, Path], data: Path) -> None:
    with pytest.raises(UserFault, match="has no chat template; take an instruct model"):
        CausalLm(config(tiny_models["lora"])).examples(data, "jsonl")


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_pack_has_the_loss_and_the_gradients_of_its_rows_apart(
    kind: str, chat_models: dict[str, Path], data: Path
) -> None:
    found = {}
    for packs in (False, True):
        task = CausalLm(config(chat_models[kind], packing=packs, precision="fp32"))
        examples, _ = task.examples(data, "jsonl")
        torch.manual_seed(3)
        model = task.model.build("fp32").eval()
        task.model.check_on_device(model, CPU)
        model.eval()
        batches = task.data.micro_batches(examples[:12], 12)
        loss = sum((task.model.loss_sum(model, task.data.collate(b, CPU)) for b in batches), torch.zeros(()))
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[packs] = (
            loss.item(),
            gradients,
            sum(len(b) for b in batches),
            sum(task.data.targets(e) for b in batches for e in b),
        )
    (apart, slopes, rows, targets), (together, packed_slopes, sequences, packed_targets) = found[False], found[True]
    assert (rows, targets) == (12, packed_targets)
    assert sequences < 8, "12 rows of 6 to 15 tokens in sequences of 32"
    assert together == pytest.approx(apart, rel=1e-5)
    assert torch.allclose(packed_slopes, slopes, rtol=1e-3, atol=1e-5)


def test_packs_hold_every_row_once_within_their_capacity() -> None:
    rows = [Example(ids=[n + 1] * size, prompt=1) for n, size in enumerate((9, 3, 8, 2, 7, 7, 1, 10))]
    packs = packing.packed(rows, 10)
    assert sorted(r.ids[0] for p in packs for r in p.rows) == list(range(1, 9))
    assert [p.size for p in packs] == [10, 10, 10, 10, 7]
    batch = packing.collate(packs[1:2] + packs[4:], 0, CPU)
    assert batch["position_ids"].tolist() == [[*range(9), 0], [*range(7), 0, 1, 2]]
    assert batch["labels"][0].tolist() == [-100, *[1] * 8, -100], "no row's first token is predicted from another row"


def test_a_model_that_would_mix_packed_rows_is_refused() -> None:
    class Mixes(torch.nn.Module):
        config = type("C", (), {"model_type": "mixer"})

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return type("O", (), {"logits": input_ids.cumsum(1).float().unsqueeze(-1)})

    with pytest.raises(UserFault, match="in a mixer model packed rows would see each other"):
        packing.check(Mixes(), CPU)


@pytest.mark.parametrize("packs", [False, True])
def test_resume_bitwise_of_chats(packs: bool, chat_models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    train = config(chat_models["lora"], packing=packs, max_length=16)
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert len(json.loads((calm / "samples.json").read_text())) == 1
