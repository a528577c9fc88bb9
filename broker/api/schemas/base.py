"""Base class of all answers, and the answers of every server: problem documents and health."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    """An answer: made from the domain's objects; a key from a newer server is ignored by an older client."""

    model_config = ConfigDict(frozen=True, from_attributes=True, extra="ignore", use_attribute_docstrings=True)


class FieldProblem(Wire):
    field: str
    """Dotted path into the body (`train.data.prompt`), or the name of a parameter."""
    message: str
    """One line: what is wrong and what to do."""


class ProblemView(Wire):
    """An RFC 9457 problem (application/problem+json)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: tuple[FieldProblem, ...] = ()


class Health(Wire):
    """`checks`: the parts of /readyz; a part that is not well makes it a 503 problem instead, but for `clock`."""

    status: Literal["ok"]
    checks: dict[str, str] = Field(default_factory=dict)
