"""The common base of every document and configuration."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Written by people: frozen, an unknown key is an error; attribute docstrings are the published descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Document(BaseModel):
    """Written by programs: frozen, and a key from a newer version is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)
