"""Base classes and field types of all documents and configurations."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from trainer.contract.descriptions import Described

PATTERN_MESSAGES: dict[str, str] = {}
"""Error message for each regular expression of `matching`."""


def _plain_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL character cannot be stored; remove it")
    return text


Text = Annotated[str, AfterValidator(_plain_text)]
"""Text that a database, a path and an argument list can hold."""


MAX_MESSAGE = 4000
"""Largest number of characters of a message for users."""


def _shortened(text: Any) -> Any:
    return text[: MAX_MESSAGE - 1] + "…" if isinstance(text, str) and len(text) > MAX_MESSAGE else text


Message = Annotated[str, BeforeValidator(_shortened), Field(max_length=MAX_MESSAGE)]
"""Text for users in a document. A longer text is shortened, so that it does not make the document invalid."""
Name = Annotated[str, Field(max_length=256)]
"""Id, hash or name in a document."""
ObjectPath = Annotated[str, Field(max_length=4096)]
"""Path or object key in a document."""
Number = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""Whole number in a document, in the range that every database and JSON parser can represent exactly."""


def matching(pattern: str, words: str, **rules: Any) -> Any:
    """Return a field that must match `pattern`; `words`: error message otherwise, such as `must be …`."""
    PATTERN_MESSAGES[pattern] = words
    return Field(pattern=pattern, **rules)


class Config(Described):
    """Base of models that users write: frozen, with attribute notes as published descriptions.

    Unknown keys are errors; so are NaN and infinite numbers, which JSON cannot represent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)


class Document(Described):
    """Base of models that programs write: frozen; keys of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
