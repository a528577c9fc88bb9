"""Writes a spec as YAML that `spec_file.load` reads as the same spec."""

from typing import Any

import yaml

from broker.domain.formatting import visible
from trainer.contract.yaml_document import parse_value


class SpecDumper(yaml.SafeDumper):
    """Dumper that writes scripts as blocks, and quotes text that YAML 1.2 reads as another type."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if parse_value(text) == text else '"'
    if "\n" in text:
        style = "|"
    if visible(text, keep="\n") != text:  # escapes are possible between double quotes only
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


SpecDumper.add_representer(str, _text)


def spec_yaml(spec: dict[str, Any]) -> str:
    """Return a spec as YAML, with the name, the cap and the script first."""
    first = {name: spec[name] for name in ("name", "cap_usd", "script") if name in spec}
    text: str = yaml.dump(first | spec, Dumper=SpecDumper, sort_keys=False, allow_unicode=True, width=110)
    return text
