"""Translation of other tools' terms: Hugging Face's optimizers, versions of packages, quantised configs."""

import re
from collections.abc import Mapping
from typing import Any

from broker.estimator.memory.estimate import InvalidEstimate

HF_OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch": "adamw_foreach",  # torch's default on a GPU
    "adamw_torch_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
}
"""Names of transformers' `OptimizerNames`; `adamw_8bit`, `adafactor` and `sgd` have the same name here."""
PAGED = "paged_adamw_8bit"


def optimizer_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return (name of the estimated optimizer, notes)."""
    paged = f"{PAGED}: estimated as adamw_8bit with all states on the GPU, including those that it moves to the host"
    return HF_OPTIMIZERS.get(name, name), (paged,) if name == PAGED else ()


def stack_of(stack: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return (version of transformers, notes on the other packages) of `transformers=4.48.1,peft==0.14.0`.

    Raise InvalidEstimate for another form.
    """
    if stack is None:
        return None, ()
    versions: dict[str, str] = {}
    for part in stack.split(","):
        match = re.fullmatch(r"\s*([A-Za-z0-9][\w.-]*)\s*={1,2}\s*([^\s=]+)\s*", part, re.ASCII)
        if match is None:
            raise InvalidEstimate(f"--stack {stack[:100]}: write transformers=VERSION, for example transformers=4.48.1")
        name, version = match[1].lower(), match[2]
        if versions.setdefault(name, version) != version:
            raise InvalidEstimate(f"--stack {stack[:100]}: has two versions of {name}; give one")
    others = ", ".join(f"{name}={version}" for name, version in versions.items() if name != "transformers")
    notes = (f"--stack {others}: changes nothing here; only the version of transformers does",) if others else ()
    return versions.get("transformers"), notes


def unquantised(config: Mapping[str, Any], method: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return (config, notes); with method `qlora`, the config lacks its quantisation to 4 bits by bitsandbytes.

    `qlora` applies the same quantisation itself, so the estimate would otherwise refuse the config.
    """
    quantization = config.get("quantization_config")
    if method != "qlora" or not isinstance(quantization, Mapping) or quantization.get("load_in_4bit") is not True:
        return config, ()
    if quantization.get("quant_method", "bitsandbytes") != "bitsandbytes":
        return config, ()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    single = (
        "" if quantization.get("bnb_4bit_use_double_quant") is True else "; its scales are estimated as quantised too"
    )
    return plain, (f"the config is of 4 bits by bitsandbytes, as --method qlora is{single}",)
