"""What the use cases need of the daemon around them: what is for sale, and checks that cost nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from broker.domain.instance import Caps
from broker.domain.offer import Offer, ProviderStatus
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from trainer.contract.train import DataFormat


class MarketReader(Protocol):
    """What is for sale: read from memory, never from a cloud."""

    def offers(self) -> Sequence[Offer]:
        """The same objects until something changed."""
        ...

    def caps(self) -> Mapping[str, Caps]:
        """By configured provider."""
        ...

    def status(self) -> Sequence[ProviderStatus]:
        """Every configured provider, in the order of the configuration."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A spec that passed the checks that cost nothing."""

    workload: Workload
    report: Mapping[str, Any]
    """What was found, for people: JSON."""
    local_model: bool = False
    """The model is a folder of this machine."""


class Preflight(Protocol):
    """The checks before a cent is spent."""

    def summarise(self, data: Path, fmt: DataFormat) -> Mapping[str, Any]:
        """One pass over a data set's file, as JSON. Raises InvalidInput."""
        ...

    def permit(self, spec: JobSpec) -> JobSpec:
        """The spec with what was looked at in the place of names for it. Raises InvalidInput for what the installation
        does not allow, whatever was allowed before.
        """
        ...

    async def check(self, spec: JobSpec, summary: Mapping[str, Any] | None) -> Checked:
        """Columns, templates, model. Raises InvalidInput with every fault."""
        ...
