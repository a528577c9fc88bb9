"""Interfaces of the daemon that the use cases need: market, free checks, settings and hooks."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from broker.api.schemas.quotes import WhatIfRequest, WhatIfView
from broker.billing.drain import DrainBudget
from broker.billing.invoice_formats import Format
from broker.billing.reconcile import Invoice
from broker.domain.errors import Rejected
from broker.domain.instance import Caps, OrphanMachine
from broker.domain.job import Handle
from broker.domain.money import ZERO
from broker.domain.offer import CredentialCheck, Offer, ProviderStatus
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.runtime.cpu_threads import RunCpu
from trainer.contract.data_config import DataFormat


class MarketReader(Protocol):
    """Current offers, read from memory and never from a cloud."""

    def offers(self) -> Sequence[Offer]:
        """Return the same sequence object until an offer changes."""
        ...

    def caps(self) -> Mapping[str, Caps]:
        """Return capabilities by configured provider."""
        ...

    def status(self) -> Sequence[ProviderStatus]:
        """Return the status of every configured provider, in the order of the configuration."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of the free checks of a spec."""

    workload: Workload
    report: Mapping[str, Any]
    """Report of the checks for users, as JSON."""
    local_model: bool = False
    """True if the model is a folder of this machine."""


class Preflight(Protocol):
    """Free checks before a purchase."""

    async def summarise(self, data: Path, fmt: DataFormat) -> Mapping[str, Any] | None:
        """Read a file once and return its summary with the format as JSON; None: a .tar of code. Raises InvalidInput.

        The file is read within limits on memory and time, and no longer than the call lasts.
        """
        ...

    async def read_invoice(self, data: Path, fmt: Format) -> Invoice:
        """Read a cloud's invoice within the same limits. Raises InvalidInput."""
        ...

    def permit(self, spec: JobSpec) -> JobSpec:
        """Return the spec with names replaced by what they refer to now.

        Raises InvalidInput for anything that the installation no longer allows.
        """
        ...

    async def check(self, spec: JobSpec, summary: Mapping[str, Any] | None, run: RunCpu) -> Checked:
        """Check columns, templates and model by `run`. Raises InvalidInput with every fault, Busy."""
        ...

    def what_if(self, request: WhatIfRequest) -> WhatIfView:
        """Estimate memory and scaling without a data set; up to a second of CPU. Raises InvalidInput."""
        ...


NO_DRAIN_BUDGET = DrainBudget(detect_s=0.0, drain_s=0.0, teardown_proof_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the use cases. Sizes are in bytes, times in seconds."""

    spool: Path
    """Folder of running uploads; created with the first upload."""
    blobs: Path | None = None
    """Folder of the blob store; None if the blob store is not a folder."""
    upload_bytes: int = 256 * 1024**2
    """Maximum size of an upload."""
    data_hosts: Sequence[str] = ()
    """Hosts in addition to the Hub's from which data sets are imported; see `broker.api.imports.data_fetch`."""
    hub: str = "https://huggingface.co"
    """URL of the Hub from which data sets are imported."""
    poll_s: float = 2.0
    """Maximum time between two polls of a follower."""
    heartbeat_s: float = 15.0
    """Time between two comments on an idle event stream, which keep the connection open."""
    storage_usd_per_gib_month: Decimal = ZERO
    """Price of the blob store, in dollars per GiB and month."""
    drain_budget: DrainBudget = NO_DRAIN_BUDGET
    """Time that the controllers need to drain and destroy a machine."""
    lease_stale_s: float = 90.0
    """/readyz: age at which an unchanged broker's lease counts as abandoned."""


Reach = Callable[[Handle, Sequence[str], bool], Awaitable[Sequence[str]]]
"""(machine, command, is_terminal) -> argv that runs the command on the machine. Raises ProviderError."""


async def nowhere(handle: Handle, command: Sequence[str], tty: bool) -> Sequence[str]:
    """Refuse, because no provider can reach the machine. Raises Rejected."""
    raise Rejected(f"{handle.provider} is not configured here, so there is no way to {handle.name}")


CheckProviders = Callable[[], Awaitable[Mapping[str, CredentialCheck]]]
"""() -> check of each provider's credentials."""


async def _no_checks() -> Mapping[str, CredentialCheck]:
    return {}


@dataclass(frozen=True, kw_only=True)
class DaemonHooks:
    """Functions of the daemon that the use cases call."""

    reach: Reach = nowhere
    check_providers: CheckProviders = _no_checks
    skew: Callable[[], float] = lambda: 0.0
    """() -> seconds that this host's wall clock is ahead of the broker's clock."""
    clock_step: Callable[[], float] = lambda: 0.0
    """() -> seconds by which the database's clock was set ahead (negative: back); 0: it is right."""
    claim_fault: Callable[[], str] = lambda: ""
    """() -> why the controllers cannot claim jobs or attempts, in one line; empty: they can."""
    orphans: Callable[[], Sequence[OrphanMachine]] = tuple
    """() -> orphans of each cloud's latest listing by this broker."""
