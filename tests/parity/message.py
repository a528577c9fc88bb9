"""A spec as a program would write it into a message: from JSON, without the broker's own codec."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def write(message: Any, given: Mapping[str, Any]) -> Any:
    """Set the fields that `given` names; a word that is not in the enum becomes an undefined number."""
    for name, value in given.items():
        if value is not None:
            _write(message, name, value)
    return message


def _write(message: Any, name: str, value: Any) -> None:
    if name in message.DESCRIPTOR.oneofs_by_name:
        kind = value["kind"]
        getattr(message, kind).SetInParent()
        write(getattr(message, kind), {k: v for k, v in value.items() if k != "kind"})
        return
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    if isinstance(value, datetime):
        getattr(message, name).FromDatetime(value)
    elif field.message_type is not None and field.message_type.name == "Timestamp":
        getattr(message, name).FromJsonString(value)
    elif isinstance(value, Mapping) and isinstance(getattr(message, name), Message):
        getattr(message, name).SetInParent()
        write(getattr(message, name), value)
    elif isinstance(value, Mapping):
        getattr(message, name).update(value)
    elif isinstance(value, list | tuple) and not field.is_repeated:
        getattr(message, name).SetInParent()
        _write(getattr(message, name), "items", value)
    elif isinstance(value, list | tuple):
        getattr(message, name).extend(_scalar(field, v) for v in value)
    elif name == "global_batch" and value == "auto":
        message.global_batch = 0
    elif value != "auto" or field.type == FieldDescriptor.TYPE_STRING or field.enum_type is not None:
        setattr(message, name, _scalar(field, value))


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is None:
        return str(value) if field.type == FieldDescriptor.TYPE_STRING else value
    prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
    known = field.enum_type.values_by_name.get(prefix + value.upper().replace("-", "_"))
    return 77 if known is None else known.number
