"""Chat templates with today's date: a job has one date, independent of the day on which an attempt tokenises."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support.tokenizers import byte_level
from trainer import tasks
from trainer.contract.train import TrainConfig
from trainer.dataset import chats
from trainer.tasks.common import chat_template, template_date

DATED = "{% if add_generation_prompt is defined %}Today is {{ strftime_now('%d %b %Y') }}. {% endif %}"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("dated") / "model"
    tokenizer = byte_level()
    tokenizer.chat_template = DATED + TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), intermediate_size=16, **sizes)).save_pretrained(folder)
    return folder


def rows_on(model: Path, folder: Path, date: str) -> tuple[list[list[int]], str, int]:
    """Return the token ids of an attempt with its token cache, one text, and when the cache was written."""
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    (folder / "chats.jsonl").write_text((json.dumps({"chat": messages}) + "\n") * 3)
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    data = {"path": "chats.jsonl", "messages": "chat"}
    task = tasks.build_task(TrainConfig.model_validate({"model": str(model), "data": data}))
    task.data.date = date
    digest = hashlib.sha256((folder / "chats.jsonl").read_bytes()).hexdigest()
    examples, _ = task.examples(folder / "chats.jsonl", "jsonl", cache=cache, data_sha256=digest)
    text = task.data.tokenizer.decode(examples[0].ids)
    return [example.ids for example in examples], text, (cache / "rows.bin").stat().st_mtime_ns


def test_an_attempt_on_another_day_has_the_tokens_of_the_jobs_date(model: Path, tmp_path: Path) -> None:
    first, text, written = rows_on(model, tmp_path, "2026-02-03")
    assert "Today is 03 Feb 2026." in text
    assert rows_on(model, tmp_path, "2026-02-03") == (first, text, written), "the cache is used"
    other, text, written_again = rows_on(model, tmp_path, "2026-02-04")
    assert "Today is 04 Feb 2026." in text
    assert other != first
    assert written_again != written, "another date is another cache"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["found", "generation"])
def test_every_rendering_has_the_date(template: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = DATED + template
    template_date.fix(tokenizer, "2026-02-03")
    chat = chats.parse([{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}])
    example = chat_template.encode(tokenizer, chat, 512, "row 1")
    assert "Today is 03 Feb 2026." in tokenizer.decode(example.ids)
    assert "Today is 03 Feb 2026." in chat_template.render_question(tokenizer, "Hi?")


def test_the_date_is_part_of_the_identity_only_if_it_is_rendered() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    assert template_date.rendered_date(tokenizer, "2026-02-03") == ""
    tokenizer.chat_template = DATED + TEMPLATE
    assert template_date.rendered_date(tokenizer, "2026-02-03") == "2026-02-03"
    template_date.fix(tokenizer, "2026-01-01")
    assert template_date.rendered_date(tokenizer, "2026-02-03") == "2026-01-01"
    with pytest.raises(chats.BadChat, match="'strftime_now', which a row may not set"):
        chats.parse([{"role": "assistant", "content": "Yes."}], {"chat_template_kwargs": {"strftime_now": 1}})
