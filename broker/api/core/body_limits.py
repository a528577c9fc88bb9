"""Bound on the number of values in a request, for HTTP and gRPC.

Validation holds the event loop, and its time grows with the number of values: 4 MB of short keys take 5 s.
"""

from google.protobuf.message import Message

from broker.domain.errors import InvalidInput, Problem

MAX_VALUES = 20_000
"""Values, keys and list items of one request. The largest valid documents have about a tenth."""

QUOTES = 4
"""Quotation marks of a key and a text, the value with the most."""

MAX_TEXT_BYTES = 400_000
"""Bytes of one text or key. The longest valid text has 32,768 characters, each of at most 12 bytes as `\\u` escapes."""


def check_json_values(raw: bytes) -> None:
    """Raise InvalidInput if a JSON document has more than MAX_VALUES values, or a text of over MAX_TEXT_BYTES.

    Malformed documents pass.
    """
    if raw.count(b",") < MAX_VALUES and len(raw) <= MAX_TEXT_BYTES:
        return
    unescaped = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if unescaped.count(b'"') > QUOTES * MAX_VALUES:
        raise _too_many("body")
    parts = unescaped.split(b'"')
    if sum(part.count(b",") for part in parts[::2]) >= MAX_VALUES:
        raise _too_many("body")
    if any(len(part) > MAX_TEXT_BYTES for part in parts[1::2]):
        message = f"has a text of more than {MAX_TEXT_BYTES} bytes; send less, and upload files"
        raise InvalidInput(Problem(field="body", message=message))


def check_message_values(message: Message) -> None:
    """Raise InvalidInput if a protobuf message has more than MAX_VALUES values."""
    if _values_left(message, MAX_VALUES) < 0:
        raise _too_many("message")


def _values_left(message: Message, left: int) -> int:
    """Return `left` less the values of the message; negative as soon as there are too many."""
    for field, value in message.ListFields():
        left -= len(value) if field.is_repeated else 1
        if left < 0:
            return left
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        if inner is not None and is_map:
            inner = inner.fields_by_name["value"].message_type
        if inner is None:
            continue
        for part in (value.values() if is_map else value) if field.is_repeated else (value,):
            left = _values_left(part, left)
            if left < 0:
                return left
    return left


def _too_many(field: str) -> InvalidInput:
    return InvalidInput(Problem(field=field, message=f"has more than {MAX_VALUES} values; send fewer"))
