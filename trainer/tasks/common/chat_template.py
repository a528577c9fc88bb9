"""Chats rendered by the model's own template, with the loss on the assistant's turns only."""

from typing import Any

import jinja2

from trainer.batching.examples import Example
from trainer.dataset.prompts import DataError

REFUSALS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Exceptions of a template for an unsupported chat, e.g. because it adds a number to a text or lacks a key."""


def render(tokenizer: Any, messages: list[dict[str, Any]], *, ask: bool) -> str:
    """Return the rendered chat. `ask`: True ends it where the assistant's answer begins."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    return text


def render_question(tokenizer: Any, text: str) -> str:
    """Return a chat with one turn of the user, up to where the answer begins."""
    return render(tokenizer, [{"role": "user", "content": text}], ask=True)


def encode(
    tokenizer: Any, messages: list[dict[str, Any]], max_length: int, where: str, *, last: bool = False
) -> Example:
    """Return the tokens of a chat, cut at the end to `max_length`. `last`: the loss is on the last answer alone.

    Each answer is tokenised separately from its prompt, as at generation. Turns after the assistant's last one are left
    out, because they have no loss. Raises DataError for a template that changes earlier turns when later ones follow,
    since the tokens of the turns could not be separated.
    """
    ids: list[int] = []
    silent_spans: list[tuple[int, int]] = []
    rendered = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            question = render(tokenizer, messages[:number], ask=True)
            answered = render(tokenizer, messages[: number + 1], ask=False)
        except REFUSALS as e:
            reason = first_line(e)
            raise DataError(f"{where}: the model's chat template refuses the chat ({reason}); mend the row") from None
        if not question.startswith(rendered) or not answered.startswith(question):
            raise DataError(
                f"{where}: the model's chat template changes earlier turns when later ones follow (message "
                f"{number + 1}); give each answer a row of its own"
            )
        head = _tokens(tokenizer, question[len(rendered) :])
        tail = _tokens(tokenizer, answered[len(question) :])
        silent_spans.append((len(ids), len(ids) + len(head)))
        ids += head + tail
        rendered = answered
    if last:
        return Example(ids=ids[:max_length], prompt=min(silent_spans[-1][1], max_length))
    cut = [(min(start, max_length), min(end, max_length)) for start, end in silent_spans]
    return Example(ids=ids[:max_length], prompt=cut[0][1], silent=tuple(s for s in cut[1:] if s[0] < s[1]))


def first_line(error: Exception) -> str:
    """Return the first line of the message of a template's exception, or the exception's class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
