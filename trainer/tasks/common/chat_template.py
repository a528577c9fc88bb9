"""Chats rendered by the model's own template, with the loss on the assistant's turns only."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from trainer.batching.examples import Example, example_of, tokenised
from trainer.dataset.chats import Chat
from trainer.dataset.prompts import DataError
from trainer.tasks.common import answer_spans
from trainer.tasks.common.answer_spans import REFUSALS, RenderedChat

Notice = Callable[[str], None]
"""Receiver of a text about the row, for people."""


def render_question(tokenizer: Any, text: str) -> str:
    """Return a chat with one turn of the user, up to where the answer begins."""
    return answer_spans.render(tokenizer, Chat(messages=[{"role": "user", "content": text}]), ask=True)


def encode(
    tokenizer: Any,
    chat: Chat,
    max_length: int,
    where: str,
    *,
    last: bool = False,
    checked_calls: int = 0,
    notice: Notice = lambda text: None,
) -> Example:
    """Return the tokens of a chat, cut at the end to `max_length`. `last`: the loss is on the last answer alone.

    `checked_calls`: number of first messages whose tool calls the template is known to show.

    The rendered text is tokenised once, and the loss is where the answers' characters are. Turns after the last answer
    are left out, because they have no loss. If the text does not show where an earlier answer is, the loss is on the
    last one, and `notice` receives the reason. Raises DataError for a chat that the template refuses, or whose last
    answer is not found.
    """
    numbers = answer_spans.answer_indices(chat)
    chat = chat.upto(numbers[-1] + 1)
    rendered = _rendered(tokenizer, chat, where, last=last, checked_calls=checked_calls)
    answers = [number for number in (numbers[-1:] if last else numbers) if number not in chat.muted]
    if any(number not in rendered.spans for number in answers):
        notice("only the last answer is learned, because the chat template hides where earlier ones are")
        answers = [number for number in answers if number == numbers[-1]]
    elif rendered.is_rewritten and answers != numbers[-1:]:
        notice("earlier answers are learned as the chat template shows them; data.learn: split learns them as given")
    spans = [rendered.spans[number] for number in answers]
    ids, has_loss = tokenised(tokenizer, rendered.text, spans, special=False)
    return example_of(ids[:max_length], has_loss[:max_length])


def unused(tokenizer: Any, chat: Chat) -> Iterator[str]:
    """Yield what the row gives and the chat template does not read, in words for users."""
    template = tokenizer.get_chat_template(tools=chat.tools)
    for name, value in (("tools", chat.tools), ("documents", chat.documents), *chat.options.items()):
        if value is not None and not _names(template, name):
            yield f"{name} in the row is not used, because the chat template has no place for it"
    keys = {key for message in chat.messages for key in message} - {"role", "content", "tool_calls"}
    for key in sorted(keys):
        if not _names(template, key):
            yield f"the key {key!r} of messages is not used, because the chat template does not read it"


def _names(template: str, name: str) -> bool:
    """Return True if a template has the name as a word."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def split(tokenizer: Any, chat: Chat, max_length: int, where: str) -> list[Example]:
    """Return one example for each answer, with the turns before it as the model reads them when it answers."""
    answers = [number for number in answer_spans.answer_indices(chat) if number not in chat.muted]
    return [
        encode(tokenizer, chat.upto(number + 1), max_length, where, last=True, checked_calls=before + 1)
        for before, number in pairwise([-1, *answers])
    ]


def _rendered(tokenizer: Any, chat: Chat, where: str, *, last: bool, checked_calls: int) -> RenderedChat:
    """Return the rendered chat, in the first form whose last answer is found. Raises DataError."""
    problem, end = "", len(chat.messages) - 1
    for form in chat.forms():
        if form.in_parts and not answer_spans.reads_parts(tokenizer, form):
            continue
        try:
            rendered = answer_spans.find(tokenizer, form, last=last)
        except REFUSALS as e:
            problem = problem or f"refuses the chat ({first_line(e)}); mend the row"
            continue
        span = rendered.spans.get(end)
        if span is not None and answer_spans.has_text(tokenizer, form, end, rendered.text[slice(*span)]):
            _check_calls(tokenizer, form, where, checked_calls)
            return rendered
        problem = problem or (
            f"does not show message {len(chat.messages)}, the last answer, in what it renders; take a model with "
            "another template, or drop the row"
        )
    raise DataError(f"{where}: the model's chat template {problem}")


def _check_calls(tokenizer: Any, chat: Chat, where: str, checked_calls: int) -> None:
    """Raise DataError for a tool call after the first `checked_calls` messages that the template leaves out."""
    for number, message in enumerate(chat.messages):
        if number < checked_calls or "tool_calls" not in message:
            continue
        without = {key: value for key, value in message.items() if key != "tool_calls"}
        try:
            same = answer_spans.render(tokenizer, chat.upto(number + 1), ask=False) == answer_spans.render(
                tokenizer, chat.having(number, without).upto(number + 1), ask=False
            )
        except REFUSALS:
            continue
        if same:
            raise DataError(
                f"{where}: the model's chat template has no place for tool_calls (message {number + 1}); take a model "
                "whose template has one, or write the call into content"
            )


def first_line(error: Exception) -> str:
    """Return the first line of the message of a template's exception, or the exception's class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
