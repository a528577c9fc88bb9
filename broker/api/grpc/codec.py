"""Converts protobuf messages to the API's pydantic models and back, by one rule for every field.

| pydantic | protobuf |
|---|---|
| `None`, a default | no presence: the field is not set |
| a model; a union of models by `kind` | a message; a oneof of the union's name, one field for each kind |
| an enum or literals | an enum, `PREFIX_VALUE`; `PREFIX_UNSPECIFIED` is not set |
| Decimal | a decimal string |
| datetime; a mapping of anything | Timestamp; Struct |
| a tuple that is not empty by default | a message with `items`, so that an empty tuple differs from an absent one |
| a tuple of numbers or None | a repeated double; NaN is None |
| a word, or a tuple of texts | an enum for the words, and a repeated string `<name>_named` for the texts |
| a number or a word that replaces it | an optional number; the word is "not set" if it is the default, otherwise 0 |
"""

import enum
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from decimal import Decimal
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar

from google.protobuf import json_format, timestamp_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from broker.api.core.body_limits import check_message_values
from broker.api.core.problems import invalid_input_of
from trainer.contract.base import Config

Model = TypeVar("Model", bound=BaseModel)
Made = TypeVar("Made", bound=Message)
TIMESTAMP, STRUCT = "google.protobuf.Timestamp", "google.protobuf.Struct"
ITEMS = "items"
NAMED = "_named"
"""Suffix of the repeated-string field for values that are not words of an enum."""


# ----------------------------------------------------------------------------------------------- from messages, checked


def parse(message: Message, model: type[Model]) -> Model:
    """Return the model of a message, by the rules of a JSON body. Raises InvalidInput with the same problems."""
    check_message_values(message)
    content = plain(message, model)
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise invalid_input_of(error, model, content, root="message") from None


def plain(message: Message, model: type[BaseModel]) -> dict[str, Any]:
    """Return a message as JSON objects for the model. Fields that only one of the two has are left out."""
    content: dict[str, Any] = {}
    for name, read in _readers(message.DESCRIPTOR, model):
        value = read(message)
        if value is not _ABSENT:
            content[name] = value
    return content


_ABSENT = object()
Read = Callable[[Any], Any]


@cache
def _readers(descriptor: Descriptor, model: type[BaseModel]) -> tuple[tuple[str, Read], ...]:
    readers = []
    for name, info in model.model_fields.items():
        oneof = descriptor.oneofs_by_name.get(name)
        field = descriptor.fields_by_name.get(name)
        if oneof is not None:
            readers.append((name, _union(oneof.name, models_in(info.annotation))))
        elif field is not None:
            read = _field(field, info, model)
            readers.append((name, _or_named(name + NAMED, read) if name + NAMED in descriptor.fields_by_name else read))
    return tuple(readers)


def _or_named(name: str, word: Read) -> Read:
    return lambda message: list(getattr(message, name)) or word(message)


def _field(field: FieldDescriptor, info: FieldInfo, model: type[BaseModel]) -> Read:
    name, required = field.name, info.is_required()
    absent = None if required and type(None) in types_in(info.annotation) else _ABSENT
    if is_map(field):
        return lambda message: dict(getattr(message, name)) or ({} if required else _ABSENT)
    convert = _or_word(field, info, _convert(field, info.annotation))
    if field.is_repeated:
        return lambda message: [convert(v) for v in getattr(message, name)] or ([] if required else _ABSENT)
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else absent
    missing = 0 if field.enum_type is not None else "" if issubclass(model, Config) else None

    def read(message: Any) -> Any:
        value = getattr(message, name)
        return _ABSENT if value == missing else convert(value)

    return read


def _or_word(field: FieldDescriptor, info: FieldInfo, convert: Read) -> Read:
    """Convert 0 to the word that replaces a number, if the default is a number."""
    words = choices(info.annotation)
    if not _number(field) or len(words) != 1 or info.default == words[0]:
        return convert
    return lambda value: convert(value) if value else words[0]


def _number(field: FieldDescriptor) -> bool:
    return field.enum_type is None and field.message_type is None and field.type != FieldDescriptor.TYPE_STRING


def _convert(field: FieldDescriptor, annotation: Any) -> Read:
    if field.enum_type is not None:
        texts = {value.number: _text(value.name, field.enum_type, annotation) for value in field.enum_type.values[1:]}
        return lambda number: texts.get(number, str(number))
    if field.is_repeated and field.type == FieldDescriptor.TYPE_DOUBLE and type(None) in types_in(annotation):
        return lambda value: None if math.isnan(value) else value
    if field.message_type is None:
        return lambda value: value
    if field.message_type.full_name == TIMESTAMP:
        return _iso
    if field.message_type.full_name == STRUCT:
        return json_format.MessageToDict
    inner = models_in(annotation)
    if inner:
        return lambda message: plain(message, next(iter(inner.values())))
    convert_item = _convert(field.message_type.fields_by_name[ITEMS], annotation)
    return lambda message: [convert_item(v) for v in message.items]


def _union(name: str, kinds: Mapping[str, type[BaseModel]]) -> Read:
    def read(message: Message) -> Any:
        kind = message.WhichOneof(name)
        return _ABSENT if kind is None else {"kind": kind, **plain(getattr(message, kind), kinds[kind])}

    return read


def _iso(stamp: timestamp_pb2.Timestamp) -> str:
    """Return a timestamp as ISO 8601, or a text that every rule refuses if it is outside the years 1 to 9999."""
    try:
        return stamp.ToDatetime(UTC).isoformat()
    except ValueError:
        return f"{stamp.seconds} s {stamp.nanos} ns"


def _text(name: str, kind: EnumDescriptor, annotation: Any) -> str:
    bare = name.removeprefix(prefix(kind))
    return next((c for c in choices(annotation) if _constant(c) == bare), bare.lower())


# ----------------------------------------------------------------------------------------------------- into messages


def fill_message(message: Made, source: BaseModel) -> Made:
    """Set every field of the message that the source has, and return the message."""
    for name, write in _writers(message.DESCRIPTOR):
        value = getattr(source, name, None)
        if value is not None and not (name in _numbers(message.DESCRIPTOR) and _is_default_word(source, name, value)):
            write(message, value)
    return message


@cache
def _numbers(descriptor: Descriptor) -> frozenset[str]:
    return frozenset(field.name for field in descriptor.fields if _number(field))


def _is_default_word(source: BaseModel, name: str, value: Any) -> bool:
    return isinstance(value, str) and bool(type(source).model_fields[name].default == value)


Write = Callable[[Any, Any], None]


@cache
def _writers(descriptor: Descriptor) -> tuple[tuple[str, Write], ...]:
    unions = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
    alone = [field for field in descriptor.fields if field.containing_oneof not in unions]
    return (*((f.name, _writer(f)) for f in alone), *((u.name, _fill_union) for u in unions))


def _fill_union(message: Any, value: Any) -> None:
    member = getattr(message, value.kind)
    member.SetInParent()
    fill_message(member, value)


def _writer(field: FieldDescriptor) -> Write:
    name, kind = field.name, field.message_type
    if is_map(field):
        return lambda message, value: getattr(message, name).update({str(k): v for k, v in value.items()})
    if field.is_repeated and kind is not None:

        def add(message: Any, value: Sequence[BaseModel]) -> None:
            for item in value:
                fill_message(getattr(message, name).add(), item)

        return add
    if field.is_repeated:
        return lambda message, value: getattr(message, name).extend(_scalar(field, v) for v in value)
    if kind is None:
        return lambda message, value: _set(message, field, value)
    if kind.full_name == TIMESTAMP:
        return lambda message, value: getattr(message, name).FromDatetime(value)
    if kind.full_name == STRUCT:
        return lambda message, value: _set_struct(getattr(message, name), value)

    def nest(message: Any, value: Any) -> None:
        inner = getattr(message, name)
        inner.SetInParent()
        if isinstance(value, BaseModel):
            fill_message(inner, value)
        else:
            inner.items.extend(_scalar(kind.fields_by_name[ITEMS], v) for v in value)

    return nest


def _set_struct(struct: Any, value: Mapping[str, Any]) -> None:
    struct.SetInParent()
    struct.update(value)


def _set(message: Any, field: FieldDescriptor, value: Any) -> None:
    if isinstance(value, tuple):
        getattr(message, field.name + NAMED).extend(value)
        return
    word = isinstance(value, str) and _number(field)
    setattr(message, field.name, 0 if word else _scalar(field, value))


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    if value is None:
        return math.nan
    if field.enum_type is not None:
        return field.enum_type.values_by_name[prefix(field.enum_type) + _constant(str(value))].number
    if isinstance(value, Decimal):
        return f"{value:f}"
    return value


# ---------------------------------------------------------------------------------------------------------- field kinds


def prefix(kind: EnumDescriptor) -> str:
    """Return the prefix of an enum's values: `JOB_STATE_` for JobState."""
    return kind.values[0].name.removesuffix("UNSPECIFIED")


def _constant(text: str) -> str:
    return text.upper().replace("-", "_")


def is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def types_in(annotation: Any) -> tuple[Any, ...]:
    """Return the types in an annotation, with unions, tuples and Annotated expanded.

    A mapping is returned itself, not its values.
    """
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return types_in(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType, tuple):
        return tuple(p for a in typing.get_args(annotation) if a is not ... for p in types_in(a))
    return (annotation,)


def models_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the models in an annotation by their `kind`, or by name if they have none."""
    models = [p for p in types_in(annotation) if isinstance(p, type) and issubclass(p, BaseModel)]
    return {m.model_fields["kind"].default if "kind" in m.model_fields else m.__name__: m for m in models}


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that an enum or literals allow."""
    words: list[str] = []
    for part in types_in(annotation):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            words += [member.value for member in part]
        elif typing.get_origin(part) is Literal:
            words += typing.get_args(part)
    return tuple(words)
