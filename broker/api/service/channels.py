"""Use cases of notification channels."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker.api.core.auth import Caller, Forbidden
from broker.api.core.problems import Conflict, NotFound
from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.domain.ids import ID_LENGTH, base32
from broker.domain.notifications import LOG_CHANNEL, NOTICES, Channel, Delivery, Notice
from broker.ports import ChannelStatus, Clock, Notifier, Store
from broker.runtime.secret_box import SecretBox

MAX_CHANNELS = 100
"""Maximum number of channels of one team."""
TEST_S = 30.0
CHANGE_TRIES = 3
ID_ENTROPY = 9


RENEWED = "nothing was changed: the channel has a newer signing secret than the one shown; open the channel again"


def secret_version(channel: Channel) -> str:
    """Return a text that changes with the channel's secrets and reveals nothing of them."""
    return hashlib.sha256(channel.sealed or b"").hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class NewChannel:
    """Properties of a new channel.

    `team` None: the caller's own. `installation`: the channel has no team (operators only).
    """

    kind: str
    name: str
    team: str | None = None
    installation: bool = False
    events: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Tested:
    """Result of a test message."""

    delivered: bool
    detail: str = ""
    """Fault reported by the receiver, in one line."""
    seconds: float = 0.0


class ChannelService:
    """Use cases of channels. `entropy(n)` returns n random bytes."""

    def __init__(
        self,
        store: Store,
        notifiers: Sequence[Notifier],
        box: SecretBox,
        clock: Clock,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._store = store
        self._notifiers = {notifier.kind: notifier for notifier in notifiers}
        self._box = box
        self._clock = clock
        self._entropy = entropy

    async def list(self, caller: Caller) -> Sequence[ChannelStatus]:
        """List the channels of the caller's team; for an operator all channels."""
        return await self._store.as_tenant(caller.tenant).channels()

    async def status(self, caller: Caller, channel_id: str) -> ChannelStatus:
        """Return one channel with its backlog. Raises NotFound."""
        channel_status = next((status for status in await self.list(caller) if status.channel.id == channel_id), None)
        if channel_status is None:
            raise NotFound(f"no channel {channel_id}; `gpubroker channel ls` lists yours")
        return channel_status

    async def create(self, caller: Caller, new: NewChannel) -> tuple[Channel, str | None]:
        """Return (the channel, its generated secret or None). The secret is never shown again.

        Raises Forbidden, InvalidInput, Conflict.
        """
        team = await self._team(caller, new)
        notifier = self._notifiers.get(new.kind)
        if notifier is None:
            kinds = ", ".join(sorted(kind for kind in self._notifiers if kind != LOG_CHANNEL))
            raise InvalidInput(Problem(field="kind", message=f"no kind {new.kind!r}; use one of {kinds}"))
        config, secrets = notifier.check(new.config, new.secrets)
        secrets, secret = notifier.fresh(secrets)
        rows = self._store.as_tenant(caller.tenant)
        if sum(status.channel.team == team for status in await rows.channels()) >= MAX_CHANNELS:
            raise Conflict(f"there are {MAX_CHANNELS} channels already; `gpubroker channel remove` removes one")
        channel = Channel(
            id=base32(self._entropy(ID_ENTROPY), ID_LENGTH),
            kind=new.kind,
            name=new.name,
            team=team,
            events=new.events,
            config=config,
            sealed=self._box.seal(json.dumps(dict(secrets))),
            created_at=self._clock.now(),
        )
        if not await rows.add_channel(channel):
            raise Conflict(f"there is a channel {new.name} already; choose another name")
        return channel, secret

    async def _team(self, caller: Caller, new: NewChannel) -> str | None:
        if new.installation:
            if not caller.admin:
                raise Forbidden("this token lacks the scope 'admin', which a channel of the installation needs")
            return None
        team = new.team or caller.team
        if all(team_row.name != team for team_row in await self._store.as_tenant(caller.tenant).teams()):
            raise InvalidInput(Problem(field="team", message=f"no team {team}; `gpubroker team ls` lists yours"))
        return team

    async def change(
        self, caller: Caller, channel_id: str, *, events: tuple[str, ...] | None, enabled: bool | None
    ) -> ChannelStatus:
        """Change a channel; None leaves a property unchanged. Raises NotFound.

        Enabling a channel clears its failures and delivers its backlog.
        """
        rows = self._store.as_tenant(caller.tenant)
        for _ in range(CHANGE_TRIES):  # a secret that was renewed since the channel was read is kept
            channel = (await self.status(caller, channel_id)).channel
            changed = replace(
                channel,
                events=channel.events if events is None else events,
                enabled=channel.enabled if enabled is None else enabled,
                reason=f"disabled by {caller.owner}" if enabled is False else channel.reason,
            )
            if await rows.write_channel(changed, channel.sealed):
                return await self.status(caller, channel_id)
        raise NotFound(f"no channel {channel_id}; `gpubroker channel ls` lists yours")

    async def rotate(self, caller: Caller, channel_id: str, shown_version: str | None = None) -> tuple[Channel, str]:
        """Return (the channel, its new secret). The secret is never shown again. Raises NotFound, Conflict.

        `shown_version`: the `secret_version` that is replaced, so that a repeat changes nothing; None: the present one.
        """
        channel = (await self.status(caller, channel_id)).channel
        if shown_version not in (None, secret_version(channel)):
            raise Conflict(RENEWED)
        notifier = self._notifiers.get(channel.kind)
        if notifier is None or channel.sealed is None:
            raise Conflict(f"a channel of the kind {channel.kind} has no secret of ours; remove and add it instead")
        secrets, secret = notifier.fresh(json.loads(self._box.open(channel.sealed)))
        if secret is None:
            raise Conflict(f"the secrets of a channel of the kind {channel.kind} are its receiver's; add it again")
        changed = replace(channel, sealed=self._box.seal(json.dumps(dict(secrets))))
        if not await self._store.as_tenant(caller.tenant).write_channel(changed, channel.sealed):
            await self.status(caller, channel_id)
            raise Conflict(RENEWED)
        return changed, secret

    async def test(self, caller: Caller, channel_id: str) -> Tested:
        """Send a real message at once, bypassing the outbox, also through a disabled channel. Raises NotFound."""
        channel = (await self.status(caller, channel_id)).channel
        notifier = self._notifiers.get(channel.kind)
        if notifier is None:
            return Tested(delivered=False, detail=f"this daemon serves no channels of the kind {channel.kind}")
        notice = Notice(
            id=f"test-{base32(self._entropy(ID_ENTROPY), ID_LENGTH)}",
            kind="channel.test",
            team=channel.team,
            message=f"a test of the channel {channel.name}, asked for by {caller.owner}",
            at=self._clock.now(),
        )
        begun = self._clock.monotonic()
        try:
            async with asyncio.timeout(TEST_S):
                await notifier.deliver(channel, Delivery(stream=NOTICES, notice=notice), None, None)
        except TimeoutError:
            return Tested(delivered=False, detail=f"no answer within {TEST_S:.0f} s", seconds=TEST_S)
        except GpubrokerError as error:
            return Tested(delivered=False, detail=str(error), seconds=self._clock.monotonic() - begun)
        return Tested(delivered=True, seconds=self._clock.monotonic() - begun)

    async def delete(self, caller: Caller, channel_id: str) -> None:
        """Delete a channel with its backlog. Raises NotFound, Conflict."""
        channel = (await self.status(caller, channel_id)).channel
        if channel.id == LOG_CHANNEL:
            raise Conflict("the log is a part of every installation; disable it instead")
        if not await self._store.as_tenant(caller.tenant).delete_channel(channel.id):
            raise NotFound(f"no channel {channel_id}; `gpubroker channel ls` lists yours")
