"""Attribute notes of models as the descriptions of their fields, read from the source on demand.

`use_attribute_docstrings` of pydantic parses the source of every class at import, which takes longer than the rest of
the import. Descriptions are needed for published schemas and templates only.
"""

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Described(BaseModel):
    """Base of models whose JSON Schema shows the attribute notes as descriptions."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        published = handler(schema)
        properties = handler.resolve_ref_schema(published).get("properties", {})
        for name, text in descriptions(cls).items():
            alias = cls.model_fields[name].alias or name
            if alias in properties:
                properties[alias].setdefault("description", text)
        return published


@cache
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field that has one: its own, otherwise the note below the attribute."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Described) and base is not Described:
            notes = _notes(base)
            texts = {name: text for name, text in texts.items() if name not in base.__annotations__} | notes
    given = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {name: text for name, text in (texts | given).items() if name in model.model_fields}


def _notes(model: type[Any]) -> dict[str, str]:
    """Return the string that follows each annotated attribute in the body of the class."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError):  # a model without a source file
        return {}
    notes: dict[str, str] = {}
    for attribute, note in pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
        if not (isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name)):
            continue
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant) and isinstance(note.value.value, str):
            notes[attribute.target.id] = inspect.cleandoc(note.value.value)
    return notes
