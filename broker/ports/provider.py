"""The door to a cloud."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from broker.domain.ids import InstanceName
from broker.domain.instance import BootSpec, Caps, Liveness, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer


class Provider(Protocol):
    """A cloud. Errors are those of `domain.errors.ProviderError`; what cannot be classified is OutcomeUnknown."""

    @property
    def name(self) -> str: ...
    @property
    def caps(self) -> Caps: ...
    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows of the last `offers` that were left out (they cannot be true, or cannot run the image), by reason."""
        ...

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        """What is for sale now. Raises Rejected (credentials), Throttled, OutcomeUnknown."""
        ...

    def launcher_id(self) -> str:
        """Identity of what would carry out a create asked for now; stored before the create is sent."""
        ...

    async def launcher(self, launched_by: str, name: InstanceName) -> Liveness:
        """DEAD only when it is proven that this launcher can never again create `name`."""
        ...

    async def create(self, name: InstanceName, offer: Offer, boot: BootSpec) -> Sequence[Handle]:
        """All nodes or none, one set a name. Raises NoCapacity, Rejected, Throttled, OutcomeUnknown."""
        ...

    async def confirm(self, handles: Sequence[Handle], offer: Offer, boot: BootSpec) -> None:
        """What create makes sure of beyond what `list` reads back, of machines whose create was not heard. `boot`:
        `nodes` and `options` are looked at. Raises Rejected: what is wrong with one; Throttled, OutcomeUnknown.
        """
        ...

    async def cancel(self, name: InstanceName) -> None:
        """Asks whatever still carries out a create of `name` to stop; `launcher` tells when it has. Never raises."""
        ...

    async def list(self) -> Sequence[Observed]:
        """Everything under our prefix, from the cloud itself. Raises Throttled, OutcomeUnknown."""
        ...

    async def destroy(self, handle: Handle) -> None:
        """Asks for destruction; returning is no proof of absence. Raises Gone when it is absent already."""
        ...

    async def reach(self, handle: Handle, command: Sequence[str], *, tty: bool) -> Sequence[str]:
        """Argv of a process of this host that runs `command` (empty: a shell) beside the agent on that machine.

        Raises Rejected when there is no way to it, Gone when it is absent.
        """
        ...

    async def check(self) -> str | None:
        """One read-only call: None when the credentials work, else what is missing and how to get it, in one line."""
        ...

    async def close(self) -> None:
        """Lets go of connections; machines go on."""
        ...
