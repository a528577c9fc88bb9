"""Usage errors of a request that is built from arguments and options."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from broker.api.core.problems import invalid_input_of
from broker.cli.core.exit_codes import BadInput

Request = TypeVar("Request", bound=BaseModel)


def checked(model: type[Request], values: Mapping[str, Any], options: Mapping[str, str]) -> Request:
    """Return the request body. `options`: the option or argument that fills a field, by field.

    Raises BadInput naming the option, or the field if no option fills it.
    """
    try:
        return model.model_validate(values)
    except ValidationError as e:
        faults = invalid_input_of(e, model, values).problems
    problems = tuple((_option_of(fault.field, options), fault.message) for fault in faults)
    raise BadInput("\n".join(f"{place}: {message}" for place, message in problems), problems=problems)


def _option_of(field: str, options: Mapping[str, str]) -> str:
    """Return the option or argument that fills the field, or the field if none does."""
    first = field.partition(".")[0]
    return options.get(first, field)
