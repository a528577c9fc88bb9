"""Invalid messages, drawn by their descriptors."""

import math
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

INTS = st.sampled_from((-(2**31), -1, 0, 1, 2, 7, 2**31 - 1)) | st.integers(-(2**31), 2**31 - 1)
LONGS = st.sampled_from((-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1)) | INTS
DOUBLES = st.sampled_from((math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.8e308, -1.0)) | st.floats(0, 2)
TEXTS = st.sampled_from((
    "", "\0", "a\0b", "x" * 100_000, "ä" * 500, "\u202e\U0001f4a9", "../../etc/passwd", "%s%n{0}",
    "'; drop table jobs--",
    "NaN", "-Infinity", "1e999999", "1_000", "0x10", " 5 ", "5.0000000001", "999999999999999999999", "null", "upload:",
    "job/", "[", "{", "{a.__class__}", "\n", "\ud7ff\ue000", "gb_aaaaaaaa_" + "a" * 32, "a:b", "a:", ":",
)) | st.text(max_size=30)  # fmt: skip
BYTES = st.sampled_from((b"", b"\0" * 10_000, b"\xff\xfe", b"a,b\n1,2\n", b"[{]")) | st.binary(max_size=200)
KINDS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: INTS,
    FieldDescriptor.TYPE_INT64: LONGS,
    FieldDescriptor.TYPE_DOUBLE: DOUBLES,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_ENUM: st.sampled_from((-1, 0, 1, 2, 3, 99, 2**31 - 1)),
}


def messages(descriptor: Descriptor, known: dict[str, list[Any]], depth: int = 6) -> st.SearchStrategy[Any]:
    """Return any message of this type. `known`: good values by field name, tried about as often as bad ones."""

    @st.composite
    def made(draw: st.DrawFn) -> Any:
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if draw(st.booleans()):
                _put(message, field, draw, known, depth)
        return message

    return made()


def _put(message: Any, field: Any, draw: st.DrawFn, known: dict[str, list[Any]], depth: int) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = KINDS[inner.fields_by_name["value"].type]
        getattr(message, field.name).update(draw(st.dictionaries(TEXTS, value, max_size=4)))
    elif inner is not None:
        values = messages(inner, known, depth - 1) if depth else st.builds(GetMessageClass(inner))
        good = _known(field, known)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=3)))
        else:
            getattr(message, field.name).CopyFrom(draw(good | values))
    else:
        values = _known(field, known) | KINDS[field.type]
        if field.is_repeated:
            many = st.lists(values, max_size=4) | values.map(lambda v: [v] * 300)
            getattr(message, field.name).extend(draw(many))
        else:
            setattr(message, field.name, draw(values))


def _known(field: Any, known: dict[str, list[Any]]) -> st.SearchStrategy[Any]:
    """Return the known values that fit the field; several messages have a field of this name."""
    wanted: Any = Message if field.message_type else bytes if field.type == FieldDescriptor.TYPE_BYTES else str
    fitting: list[Any] = [v for v in known.get(field.name, ()) if isinstance(v, wanted)]
    if field.message_type is not None:
        fitting = [v for v in fitting if v.DESCRIPTOR.full_name == field.message_type.full_name]
    return st.sampled_from(fitting) if fitting else st.nothing()
