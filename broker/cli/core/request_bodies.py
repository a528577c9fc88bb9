"""Bodies of requests that are made of arguments and options."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from broker.api.core.problems import of_validation
from broker.cli.core.exit_codes import BadInput

Asked = TypeVar("Asked", bound=BaseModel)


def checked(model: type[Asked], given: Mapping[str, Any], options: Mapping[str, str]) -> Asked:
    """`options`: by the field of the body that each fills. Raises BadInput naming the option, else the field."""
    try:
        return model.model_validate(given)
    except ValidationError as e:
        found = of_validation(e, model, given).problems
        pairs = tuple((options.get(p.field.partition(".")[0], p.field), p.message) for p in found)
        raise BadInput("\n".join(f"{place}: {message}" for place, message in pairs), problems=pairs) from None
