"""Adapter of `broker.sizing.what_if` for the API: models of the catalogue only, and faults by field.

A model's folder would be a path of this host, and a config of the caller may take unlimited time.
"""

import re
from decimal import Decimal
from typing import Any

from broker.api.schemas.quotes import WhatIfRequest, WhatIfView
from broker.domain.errors import InvalidInput, Problem
from broker.estimator.memory.estimate import EstimateOptions
from broker.model_catalog import catalog
from broker.sizing.estimate import EstimateError
from broker.sizing.what_if import what_if
from trainer.contract.suggestions import close_matches

OPTION = re.compile(r"--([a-z-]+)(?: ([^:]*))?: (.*)", re.DOTALL)
FIELDS = {"what-if": "gpus", "seq": "max_length", "lora-r": "lora_r", "global-batch": "global_batch"}
"""Fields of the request by options of the command line, where the names differ."""


def answer_what_if(request: WhatIfRequest) -> WhatIfView:
    """Return memory and scaling; up to a second of CPU. Raises InvalidInput."""
    published = catalog.find(request.model)
    if published is None:
        hint = "".join(f", the nearest is {name}" for name in close_matches(request.model, list(catalog.names()), n=1))
        raise InvalidInput(
            Problem(field="model", message=f"not in the bundled catalogue{hint}; see `gpubroker models`")
        )
    options = EstimateOptions(method=request.method, length=request.max_length, rank=request.lora_r)
    price = request.usd_per_gpu_hour
    try:
        document = what_if(
            f"gpus={','.join(map(str, request.gpus))}", model=request.model, gpu=request.gpu, ask=options,
            global_batch=request.global_batch, rows=request.rows,
            usd_per_gpu_hour=None if price is None else float(price),
        )  # fmt: skip
    except EstimateError as error:
        raise InvalidInput(_problem(str(error))) from None
    points = [{**point, "usd": _dollars(point["usd"])} for point in document["points"]]
    return WhatIfView.model_validate({**document, "points": points, "usd_per_gpu_hour": price})


def _dollars(usd: Any) -> Decimal | None:
    return None if usd is None else Decimal(f"{usd:.4f}")


def _problem(line: str) -> Problem:
    """Return a line of the command line as the fault of a field."""
    match = OPTION.fullmatch(line)
    if match is None:
        return Problem(field="model", message=line)
    option, value, text = match.groups()
    if option == "what-if" and "no basis" in text:  # the model has no time model
        return Problem(field="model", message=text)
    return Problem(field=FIELDS.get(option, option.replace("-", "_")), message=f"{value}: {text}" if value else text)
