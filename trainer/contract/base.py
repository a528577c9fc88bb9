"""The common base of every document and configuration."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SHAPES: dict[str, str] = {}
"""What a text must be, by the pattern that it must match: an error says it in words."""


def _plain_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character cannot be stored; remove it")
    return text


Text = Annotated[str, AfterValidator(_plain_text)]
"""What a database, a path and an argument list can hold."""


def shaped(pattern: str, words: str, **rules: Any) -> Any:
    """The rule of a text that must match a pattern; `words`: what people are told where it does not, `must be …`."""
    SHAPES[pattern] = words
    return Field(pattern=pattern, **rules)


class Config(BaseModel):
    """Written by people: frozen, an unknown key is an error, as is a number that JSON has not; attribute docstrings are
    the published descriptions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Document(BaseModel):
    """Written by programs: frozen, and a key from a newer version is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)
