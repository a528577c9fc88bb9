"""Estimate: memory by category and the scaling of a fine-tune over numbers of GPUs, without a data set."""

import re
from collections.abc import Mapping
from typing import Any, get_args

from aiohttp import web
from pydantic import ValidationError

from broker.api.core import problems
from broker.api.schemas.quotes import WhatIfMethod, WhatIfRequest
from broker.domain.errors import InvalidInput
from broker.estimator.speed.hardware import TABLE
from broker.model_catalog import catalog
from broker.web.browser import Visit
from broker.web.estimate_view import scaling_summary
from broker.web.routes import Routes

routes = Routes()
COUNTS = "1, 2, 4, 8, 16, 32, 64, 128, 256, 512"
DEFAULTS: Mapping[str, str] = {
    "model": "", "gpu": "h100-sxm", "method": "lora", "gpus": COUNTS, "max_length": "2048", "global_batch": "",
    "lora_r": "16", "rows": "", "usd_per_gpu_hour": "",
}  # fmt: skip
WHOLE = frozenset({"max_length", "global_batch", "lora_r", "rows"})
CHOICES: Mapping[str, tuple[str, ...]] = {
    "gpu": tuple(name for name, hardware in TABLE.items() if hardware.gpu),
    "method": get_args(WhatIfMethod),
}


@routes.get("/ui/estimate")
async def estimate(visit: Visit) -> web.Response:
    """Show the estimate for the fields in the URL; without a model only the form."""
    query = visit.request.query
    fields = {name: query.get(name, default).strip() for name, default in DEFAULTS.items()}
    values: dict[str, Any] = {
        "given": fields, "choices": CHOICES, "models": catalog.names(), "faults": {}, "view": None, "scaling": None,
    }  # fmt: skip
    if not fields["model"]:
        return visit.page("estimate.html", **values)
    body = {name: _value(name, text) for name, text in fields.items() if text}
    try:
        try:
            request = WhatIfRequest.model_validate(body)
        except ValidationError as error:
            raise problems.invalid_input_of(error, WhatIfRequest, body, root="query") from None
        view = await visit.service.quotes.what_if(visit.caller, request)
    except InvalidInput as error:
        values["faults"] = {re.split(r"[.\[]", p.field)[0]: p.message for p in reversed(error.problems)}
        return visit.page("estimate.html", 422, **values)
    return visit.page("estimate.html", **(values | {"view": view, "scaling": scaling_summary(view)}))


def _value(name: str, text: str) -> Any:
    """Return the text of a field as a value; a text that is not a number stays a text, which the rules refuse."""
    if name == "gpus":
        return tuple(_number_or_text(part.strip()) for part in text.split(",") if part.strip())
    return _number_or_text(text) if name in WHOLE else text


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text
