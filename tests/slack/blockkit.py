"""Validator of Block Kit by Slack's documentation: the faults for which Slack would answer `invalid_blocks`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_BLOCKS = 50
SECTION_TEXT, FIELD_TEXT, HEADER_TEXT, CONTEXT_TEXT = 3000, 2000, 150, 3000
FIELDS, CONTEXT_ELEMENTS, ACTIONS = 10, 10, 25
BUTTON_TEXT, BUTTON_VALUE, ID, URL, ALT_TEXT = 75, 2000, 255, 3000, 2000
CONFIRM_TITLE, CONFIRM_TEXT, CONFIRM_LABEL = 100, 300, 30

Block = Mapping[str, Any]


def faults(blocks: object) -> list[str]:
    """Return the faults of the blocks; empty: Slack would accept them."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        return ["blocks must be an array"]
    problems = [] if len(blocks) <= MAX_BLOCKS else [f"no more than {MAX_BLOCKS} items allowed"]
    for number, block in enumerate(blocks):
        problems += [f"[{number}] {fault}" for fault in _block(block)]
    ids = [b["block_id"] for b in blocks if isinstance(b, dict) and "block_id" in b]
    if len(set(ids)) != len(ids):
        problems.append("block_id must be unique")
    return problems


def _block(block: object) -> Iterator[str]:
    if not isinstance(block, dict):
        yield "must be an object"
        return
    check = BLOCKS.get(str(block.get("type")))
    if check is None:
        yield f"unsupported type: {block.get('type')}"
        return
    if len(str(block.get("block_id", ""))) > ID:
        yield "block_id is too long"
    yield from check(block)


def _text(value: object, limit: int, *, kinds: tuple[str, ...] = ("plain_text", "mrkdwn")) -> Iterator[str]:
    if not isinstance(value, dict) or value.get("type") not in kinds:
        yield f"must be a text object of {' or '.join(kinds)}"
        return
    yield from _keys(value, {"type", "text", "emoji", "verbatim"})
    text = value.get("text")
    if not isinstance(text, str) or not text:
        yield "text must have more than 0 characters"
    elif len(text) > limit:
        yield f"text must be less than {limit + 1} characters"
    if value["type"] == "mrkdwn" and "emoji" in value:
        yield "emoji is only for plain_text"


def _keys(value: Block, known: set[str]) -> Iterator[str]:
    yield from (f"invalid additional property: {key}" for key in value if key not in known)


def _section(block: Block) -> Iterator[str]:
    yield from _keys(block, {"type", "block_id", "text", "fields", "accessory", "expand"})
    if "text" not in block and "fields" not in block:
        yield "missing required field: text or fields"
    if "text" in block:
        yield from _text(block["text"], SECTION_TEXT)
    if "fields" in block:
        if not 1 <= len(block["fields"]) <= FIELDS:
            yield f"fields: 1 to {FIELDS} items"
        for field in block["fields"]:
            yield from _text(field, FIELD_TEXT)
    if "accessory" in block:
        yield from _button(block["accessory"])


def _header(block: Block) -> Iterator[str]:
    yield from _keys(block, {"type", "block_id", "text", "level"})
    yield from _text(block.get("text"), HEADER_TEXT, kinds=("plain_text",))


def _context(block: Block) -> Iterator[str]:
    yield from _keys(block, {"type", "block_id", "elements"})
    elements = block.get("elements", ())
    if not 1 <= len(elements) <= CONTEXT_ELEMENTS:
        yield f"elements: 1 to {CONTEXT_ELEMENTS} items"
    for element in elements:
        yield from _text(element, CONTEXT_TEXT)


def _actions(block: Block) -> Iterator[str]:
    yield from _keys(block, {"type", "block_id", "elements"})
    elements = block.get("elements", ())
    if not 1 <= len(elements) <= ACTIONS:
        yield f"elements: 1 to {ACTIONS} items"
    ids = [e.get("action_id") for e in elements]
    if len(set(ids)) != len(ids):
        yield "action_id must be unique in the message"
    for element in elements:
        yield from _button(element)


def _button(element: Block) -> Iterator[str]:
    if element.get("type") != "button":
        yield f"unsupported element: {element.get('type')}"
        return
    yield from _keys(element, {"type", "text", "action_id", "url", "value", "style", "confirm", "accessibility_label"})
    yield from _text(element.get("text"), BUTTON_TEXT, kinds=("plain_text",))
    for key, limit in (("action_id", ID), ("value", BUTTON_VALUE), ("url", URL), ("accessibility_label", BUTTON_TEXT)):
        if key in element and not (isinstance(element[key], str) and len(element[key]) <= limit):
            yield f"{key} must be a string of at most {limit} characters"
    if element.get("style", "primary") not in ("primary", "danger"):
        yield "style must be primary or danger"
    if "confirm" in element:
        yield from _confirm(element["confirm"])


def _confirm(confirm: Block) -> Iterator[str]:
    yield from _keys(confirm, {"title", "text", "confirm", "deny", "style"})
    yield from _text(confirm.get("title"), CONFIRM_TITLE, kinds=("plain_text",))
    yield from _text(confirm.get("text"), CONFIRM_TEXT, kinds=("plain_text",))
    for key in ("confirm", "deny"):
        yield from _text(confirm.get(key), CONFIRM_LABEL, kinds=("plain_text",))


def _divider(block: Block) -> Iterator[str]:
    yield from _keys(block, {"type", "block_id"})


BLOCKS: Mapping[str, Callable[[Block], Iterator[str]]] = {
    "section": _section,
    "header": _header,
    "context": _context,
    "actions": _actions,
    "divider": _divider,
}
"""Block types that we post. Any other type is refused here, so that a new type must be described first."""
