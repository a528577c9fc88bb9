"""Spans of an assistant's answers in a chat that the model's own template rendered.

Tokens and loss come from one rendering of the whole chat. Templates may write an earlier answer otherwise than the last
one, e.g. without its reasoning, so the spans are found in that rendering.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.dataset.chats import Chat
from trainer.tasks.common import template_date

REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Exceptions of a template for an unsupported chat, e.g. because it adds a number to a text or lacks a key."""
MIN_IDENTIFYING_CHARACTERS = 3
"""Characters of a text that is too short to identify its message."""
MARK = "\ue000answer\ue001"
"""Text in place of an answer, of characters for private use, which no template changes."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PART_TYPE = re.compile(r"""\.type\b|\['type'\]|\["type"\]|'type'\s*,|"type"\s*,""")
"""Use of a part's type, also in `selectattr('type', ...)`."""
TAG = re.compile(r"<[^<>\s]{1,40}>")
"""Text in the form of special tokens, which a tokenizer may lack."""
Span = tuple[int, int]


def render(tokenizer: Any, chat: Chat, *, ask: bool) -> str:
    """Return the rendered chat. `ask`: True ends it where the assistant's answer begins. Raises REFUSALS."""
    text: str = tokenizer.apply_chat_template(
        chat.template_messages,
        tools=chat.tools,
        documents=chat.documents,
        tokenize=False,
        add_generation_prompt=ask,
        chat_template=template_date.fixed_template(tokenizer, chat.tools),
        **chat.options,
    )
    return text


def answer_indices(chat: Chat) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """Rendered chat, and where its answers are."""

    text: str
    spans: dict[int, Span]
    """Start and end of each answer in characters, by its index; without answers that are not found."""
    is_rewritten: bool = False
    """True if the template shows an earlier answer otherwise than the model gives it."""


def find(tokenizer: Any, chat: Chat, *, last: bool = False) -> RenderedChat:
    """Render a chat and find its answers. `last`: only the last one is needed, which takes fewer renderings.

    A span has what the model writes: reasoning, content, calls and the end of the turn. The chat ends with an answer.
    Raises REFUSALS.
    """
    text, marked = _marked(tokenizer, chat)
    numbers = answer_indices(chat)
    if len(marked) == len(numbers):
        return RenderedChat(text=text, spans=dict(zip(numbers, marked, strict=True)))
    spans: dict[int, Span] = {}
    end, is_rewritten = 0, False
    for number in numbers[-2:] if last else numbers:  # An answer begins after the end of the one before it.
        span, is_learnable = _of_prefix(tokenizer, chat, number, text), True
        if span is None:
            span = _of_mark(tokenizer, chat, number, text, end)
            if number != numbers[-1]:
                is_rewritten = True
                is_learnable = span is not None and not _has_another(chat, number, text[slice(*span)])
        if span is not None and span[0] >= end:
            end = span[1]
            if is_learnable:
                spans[number] = span
    return RenderedChat(text=text, spans=spans, is_rewritten=is_rewritten)


def has_text(tokenizer: Any, chat: Chat, number: int, part: str) -> bool:
    """Return True if a part of the rendered chat has the answer's text, or if the template shows other texts there.

    Templates of vision models leave out a text that is not in content parts.
    """
    content = chat.messages[number]["content"].strip()
    if not content or content in part or content.split("</think>")[-1].strip() in part:
        return True
    marked = chat.having(number, {"role": "assistant", "content": MARK})
    try:
        return MARK in render(tokenizer, marked, ask=False)
    except REFUSALS:
        return False


def reads_parts(tokenizer: Any, chat: Chat) -> bool:
    """Return True if the template reads content parts. Other templates would print them as Python does."""
    return PART_TYPE.search(tokenizer.get_chat_template(tools=chat.tools)) is not None


def _marked(tokenizer: Any, chat: Chat) -> tuple[str, list[Span]]:
    """Return the rendered chat, and the spans that the template itself marks by `{% generation %}`."""
    template = template_date.fixed_template(tokenizer, chat.tools) or tokenizer.get_chat_template(tools=chat.tools)
    if not GENERATION.search(template):
        return render(tokenizer, chat, ask=False), []
    rendered: Any = render_jinja_template(
        [chat.template_messages],
        tools=cast(Any, chat.tools),
        documents=chat.documents,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **chat.options},
    )
    (text,), (spans,) = rendered
    return text, [(start, end) for start, end in spans if start < end]


def _of_prefix(tokenizer: Any, chat: Chat, number: int, text: str) -> Span | None:
    """Return the span of an answer if the chat up to it, with and without it, begins the text."""
    try:
        question = render(tokenizer, chat.upto(number), ask=True)
        rendered = render(tokenizer, chat.upto(number + 1), ask=False)
    except REFUSALS:
        return None
    begins = text.startswith(rendered) and rendered.startswith(question)
    return (len(question), len(rendered)) if begins and len(question) < len(rendered) else None


def _of_mark(tokenizer: Any, chat: Chat, number: int, text: str, after: int) -> Span | None:
    """Return the span of an answer, found by rendering MARK in its place. `after`: end of the answer before it."""
    marked = chat.having(number, {"role": "assistant", "content": MARK})
    try:
        around = render(tokenizer, marked, ask=False)
        last = render(tokenizer, marked.upto(number + 1), ask=False)
    except REFUSALS:
        return None
    if around.count(MARK) != 1 or last.count(MARK) != 1:
        return None
    before, behind = around.split(MARK)
    left = _common(text, before)
    right = len(text) - _common(text[::-1], behind[::-1])
    if right < left or not _is_rendered(chat.messages[number], text[left:right]):
        return None
    start = _after_question(tokenizer, chat.upto(number), text, after, left)
    return start, right + _common_end(text[right:], last.split(MARK)[1], _special(tokenizer))


def _is_rendered(message: dict[str, Any], part: str) -> bool:
    """Return True if a part of the text can be the message: a text that was not empty has left something."""
    return bool(part.strip()) or not (message["content"].strip() or message.get("tool_calls"))


def _has_another(chat: Chat, number: int, part: str) -> bool:
    """Return True if a part of the text has the text of a message that is not the assistant's, e.g. a tool's result."""
    own = "\n".join(str(value) for value in chat.messages[number].values())
    others = (TAG.sub("", message["content"]).strip() for message in chat.messages if message["role"] != "assistant")
    without_tags = TAG.sub("", part)
    return any(
        len(other) >= MIN_IDENTIFYING_CHARACTERS and other in without_tags and other not in own for other in others
    )


def _after_question(tokenizer: Any, asked: Chat, text: str, after: int, left: int) -> int:
    """Return where the model begins to write: behind the generation prompt, or at the content if that is not found."""
    try:
        question, history = render(tokenizer, asked, ask=True), render(tokenizer, asked, ask=False)
    except REFUSALS:
        return left
    if text.startswith(question) and after <= len(question) <= left:
        return len(question)
    prompt = question[_common(question, history) :]
    start = text.rfind(prompt, after, left) if prompt.strip() else -1
    return start + len(prompt) if start >= 0 else left


def _common(first: str, second: str) -> int:
    """Return the number of leading characters that two texts share."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _common_end(text: str, end: str, special: list[str]) -> int:
    """Return how much of the end of a turn begins the text; a special token, or a tag like one, counts as a whole."""
    at = 0
    while at < len(end):
        tag = TAG.match(end, at)
        piece = tag[0] if tag else next((token for token in special if end.startswith(token, at)), end[at])
        if not text.startswith(piece, at):
            break
        at += len(piece)
    return at


def _special(tokenizer: Any) -> list[str]:
    """Return the texts of the tokenizer's added tokens, longest first."""
    return sorted((str(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
