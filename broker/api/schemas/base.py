"""The common base of every answer."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """An answer: made from the domain's objects; a key from a newer server is ignored by an older client."""

    model_config = ConfigDict(frozen=True, from_attributes=True, extra="ignore", use_attribute_docstrings=True)
