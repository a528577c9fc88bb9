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


def optimizer_of(said: str) -> tuple[str, tuple[str, ...]]:
    """Return (name of the estimated optimizer, notes)."""
    paged = (
        f"{PAGED}: taken for adamw_8bit, all of whose states are on the GPU; those that are moved to the host count too"
    )
    return HF_OPTIMIZERS.get(said, said), (paged,) if said == PAGED else ()


def stack_of(said: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return (version of transformers, notes on the other packages) of `transformers=4.48.1,peft==0.14.0`.

    Raise InvalidEstimate for another form.
    """
    if said is None:
        return None, ()
    found: dict[str, str] = {}
    for part in said.split(","):
        read = re.fullmatch(r"\s*([A-Za-z0-9][\w.-]*)\s*={1,2}\s*([^\s=]+)\s*", part, re.ASCII)
        if read is None:
            raise InvalidEstimate(f"--stack {said[:100]}: write transformers=VERSION, for example transformers=4.48.1")
        name, version = read[1].lower(), read[2]
        if found.setdefault(name, version) != version:
            raise InvalidEstimate(f"--stack {said[:100]}: has two versions of {name}; give one")
    others = ", ".join(f"{name}={version}" for name, version in found.items() if name != "transformers")
    notes = (f"--stack {others}: changes nothing here; only the version of transformers does",) if others else ()
    return found.get("transformers"), notes


def unquantised(config: Mapping[str, Any], method: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return (the config, notes) without a quantisation that the method itself applies.

    That is bitsandbytes' 4 bits for `qlora`.
    """
    said = config.get("quantization_config")
    if method != "qlora" or not isinstance(said, Mapping) or said.get("load_in_4bit") is not True:
        return config, ()
    if said.get("quant_method", "bitsandbytes") != "bitsandbytes":
        return config, ()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    single = "" if said.get("bnb_4bit_use_double_quant") is True else "; its scales are estimated as quantised too"
    return plain, (f"the config is of 4 bits by bitsandbytes, as --method qlora is{single}",)
