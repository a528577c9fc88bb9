"""Protocols of a cloud and of the clock."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, Caps, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer


class Provider(Protocol):
    """A cloud.

    Its errors are those of `domain.errors.ProviderError`; any unclassified error is OutcomeUnknown.
    """

    @property
    def name(self) -> str: ...
    @property
    def caps(self) -> Caps: ...
    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows dropped from the latest `offers` by reason, because they are implausible or cannot run the image."""
        ...

    @property
    def identity(self) -> str | None:
        """Source and account of the credentials in use, without secrets; None: the provider needs none."""
        ...

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        """Return offers for sale now. Raises Rejected (credentials), Throttled, OutcomeUnknown."""
        ...

    def launcher_id(self) -> str:
        """Return the identity of the launcher that a create would use now; the broker stores it before the create."""
        ...

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        """Return DEAD only when it is proven that this launcher can never again create `name`."""
        ...

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """Create all nodes or none, one set per name.

        Raises NoCapacity, Rejected, Throttled, OutcomeUnknown.
        """
        ...

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        """Check machines whose create was not answered, beyond what `list` reports.

        `boot`: only `nodes` and `options` are read. Raises Rejected with the fault of a machine, Throttled,
        OutcomeUnknown.
        """
        ...

    async def cancel(self, name: InstanceName) -> None:
        """Ask the launcher that creates `name` to stop; `launcher` reports when it has. Never raises."""
        ...

    async def list(self) -> Sequence[Observed]:
        """Return all machines with our prefix, from the cloud itself. Raises Throttled, OutcomeUnknown."""
        ...

    async def destroy(self, handle: Handle) -> None:
        """Request the destruction of a machine; only a listing proves its absence. Raises Gone if it is absent."""
        ...

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        """Return the argv of a local process that runs `command` (empty: a shell) on that machine.

        Raises Rejected when the machine cannot be reached, Gone when it is absent.
        """
        ...

    async def check(self) -> str | None:
        """Make one read-only call; None when the credentials work, otherwise the fault and its fix, in one line."""
        ...

    async def close(self) -> None:
        """Close connections; machines keep running."""
        ...


class Clock(Protocol):
    """Source of time.

    Wall time is for records, monotonic time for timeouts. The daemon's wall time is its database's.
    """

    def now(self) -> datetime: ...
    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
