"""A job as the command line prepared it, before it is submitted."""

from dataclasses import dataclass
from typing import Any

from broker.api.schemas.quotes import QuoteView
from broker.cli.spec.spec_file import SpecFile


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A spec as the API takes it, its files uploaded, with its quote."""

    file: SpecFile
    body: dict[str, Any]
    quote: QuoteView
    columns: tuple[str, ...] = ()
