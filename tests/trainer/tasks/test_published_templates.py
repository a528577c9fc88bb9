"""Chat templates that models publish: every answer of plain chats is learned, once, from one tokenization.

The templates are those that TRL ships (`make venv` installs its wheel for them, without what it needs to run).
"""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support.tokenizers import byte_level
from trainer.batching.examples import IGNORED, Example
from trainer.dataset import chats
from trainer.dataset.prompts import DataError
from trainer.tasks.common import answer_spans, chat_template


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = {
    "one turn": [ask("Hi?"), answer("Yes.")],
    "two turns": [ask("Hi?"), answer("Yes."), ask("Sure?"), answer("Quite.")],
    "four turns": [
        ask("a?"), answer("Yes."), ask("b?"), answer("No."), ask("c?"), answer("Third one"), ask("d?"), answer("Fourth")
    ],
    "system": [SYSTEM, ask("Hi?"), answer("Yes."), ask("Sure?"), answer("Quite.")],
    "null keys": [{**ask("Hi?"), "tool_calls": None}, answer("Yes.", tool_calls=None, name=None)],
    "reasoning": [ask("Hi?"), answer("Yes.", reasoning_content="Greet.")],
    "reasoning in content": [
        ask("Hi?"), answer("<think>\nGreet.\n</think>\n\nYes."), ask("?"), answer("<think>\nHm.\n</think>\n\nQuite.")
    ],
}  # fmt: skip
CALLS = [
    ask("Tide?"),
    answer("", tool_calls=[{"type": "function", "function": {"name": "tide", "arguments": {"port": "Lund"}}}]),
    {"role": "tool", "name": "tide", "content": "1.2"},
    answer("It is 1.2 m."),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide", "description": "Height of the tide.",
            "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
        },
    }
]  # fmt: skip


def published() -> list[Path]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted(Path(spec.submodule_search_locations[0], "chat_templates").glob("*.jinja"))


TEMPLATES = published()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Any]:
    kept, tokenizer.chat_template = tokenizer.chat_template, request.param.read_text()
    yield tokenizer
    tokenizer.chat_template = kept


def learned(tokenizer: Any, example: Example) -> list[str]:
    """Return the texts of the spans with loss."""
    texts, span = [], []
    for label in [*example.labels, IGNORED]:
        if label != IGNORED:
            span.append(label)
        elif span:
            texts.append(tokenizer.decode(span))
            span = []
    return texts


def test_all_published_templates_are_tried() -> None:
    assert len([path for path in TEMPLATES if not path.stem.endswith("_training")]) >= 41


def test_each_answer_of_plain_chats_is_learned_once(template: Any) -> None:
    for name, messages in CHATS.items():
        chat = chats.parse(messages)
        if name == "system" and "System role not supported" in template.chat_template:
            continue
        texts = learned(template, chat_template.encode(template, chat, 8192, "row 1"))
        contents = [m["content"].split("</think>")[-1].strip() for m in messages if m["role"] == "assistant"]
        assert len(texts) == len(contents), (name, texts)
        for text, content in zip(texts, contents, strict=True):
            assert text.count(content) == 1, (name, texts)
            assert not any(question in text for question in ("Hi?", "Sure?")), (name, texts)


def test_tokens_are_those_of_the_whole_text(template: Any) -> None:
    chat = chats.parse(CHATS["two turns"])
    texts = []
    for form in chat.forms():
        with contextlib.suppress(answer_spans.REFUSALS):
            texts.append(answer_spans.render(template, form, ask=False))
    text = next(text for text in texts if "Yes." in text)
    assert chat_template.encode(template, chat, 8192, "row 1").ids == template(text, add_special_tokens=False).input_ids


def test_split_learns_each_answer_as_the_model_gives_it(template: Any) -> None:
    chat = chats.parse(CHATS["two turns"])
    for example, content in zip(chat_template.split(template, chat, 8192, "row 1"), ("Yes.", "Quite."), strict=True):
        (text,) = learned(template, example)
        assert content in text


def test_tool_calls_are_learned_or_refused_by_message(template: Any) -> None:
    chat = chats.parse(CALLS, {"tools": TOOLS})
    try:
        example = chat_template.encode(template, chat, 8192, "row 1")
    except DataError as e:
        refusal = str(e)
        assert refusal.startswith("row 1: the model's chat template ")
        return
    texts = learned(template, example)
    assert "tide" in texts[0], texts
    assert "Lund" in texts[0], texts
    assert "It is 1.2 m." in texts[-1], texts
    assert not any("Height of the tide" in text for text in texts), "the tools are not an answer"


def test_a_muted_answer_is_shown_and_not_learned(template: Any) -> None:
    chat = chats.parse([ask("Hi?"), answer("Yes.", weight=0), ask("Sure?"), answer("Quite.")])
    example = chat_template.encode(template, chat, 8192, "row 1")
    assert "Yes." in template.decode(example.ids)
    assert ["Quite." in text for text in learned(template, example)] == [True]


def test_the_result_of_a_tool_is_never_learned(template: Any) -> None:
    called = answer("Let me look.", tool_calls=CALLS[1]["tool_calls"])
    messages = [CALLS[0], called, {**CALLS[2], "content": "low water"}, answer("It is so.")]
    with contextlib.suppress(DataError):
        example = chat_template.encode(template, chats.parse(messages, {"tools": TOOLS}), 8192, "row 1")
        assert not any("low water" in text for text in learned(template, example))


def test_arguments_too_deep_for_the_template_are_a_bad_row(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson(indent=1) }}{% endfor %}"
    deep = '{"a":' * 500 + "1" + "}" * 500
    calls = [{"function": {"name": "tide", "arguments": deep}}]
    with pytest.raises(DataError, match="row 1: the model's chat template refuses the chat"):
        chat_template.encode(tokenizer, chats.parse([ask("Hi?"), answer("", tool_calls=calls)]), 8192, "row 1")


@pytest.mark.parametrize("calls", [False, True])
def test_the_last_answer_is_found_in_a_constant_number_of_renderings(
    calls: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default('') }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rendered: list[int] = []
    render = answer_spans.render
    monkeypatch.setattr(answer_spans, "render", lambda *a, **k: rendered.append(1) or render(*a, **k))

    def renderings(turns: int) -> int:
        rendered.clear()
        more = {"tool_calls": [{"function": {"name": "tide", "arguments": {"port": "Lund"}}}]} if calls else {}
        chat = chats.parse([m for n in range(turns) for m in (ask(f"Hi {n}?"), answer(f"Yes {n}.", **more))])
        assert len(chat_template.split(tokenizer, chat, 8192, "row 1")) == turns
        return len(rendered)

    assert renderings(12) - renderings(6) == 2 * (renderings(6) - renderings(3))


def test_split_learns_answers_in_succession_once(template: Any) -> None:
    chat = chats.parse([ask("Hi?"), answer("First."), answer("Second."), ask("Sure?"), answer("Third.")])
    with contextlib.suppress(DataError):
        texts = [t for e in chat_template.split(template, chat, 8192, "row 1") for t in learned(template, e)]
        for content in ("First.", "Second.", "Third."):
            assert sum(content in text for text in texts) == 1, texts
