"""Use cases of Slack: links of Slack users, and requests that Slack sends.

Each request is carried out once, with the rights of the linked owner.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl

from broker.api.core.auth import Caller, Forbidden, Unauthenticated
from broker.api.core.problems import Conflict, NotFound
from broker.api.service.jobs import Service
from broker.api.service.slack_actions import HELP, SlackActions, may
from broker.domain.errors import GpubrokerError, InvalidInput, NotifyError, Problem
from broker.domain.ids import JobId
from broker.domain.notifications import Channel, JobSnapshot, SlackUser
from broker.domain.tenancy import Scope, Tenant, last_expiry, ungrantable_scopes

log = logging.getLogger(__name__)

KIND = "slack"
REPLAY_S = 900.0
"""Seconds for which a request is remembered. A signature is valid for less: 5 minutes before and after its time."""
CHANNELS_S = 5.0
"""Maximum seconds until a change of a channel takes effect in this process."""
FIELDS = 64


class SlackAdapter(Protocol):
    """Slack calls that the use cases need; implemented by `broker.notify.slack.app.SlackApp`."""

    def signers(
        self, channels: Sequence[Channel], body: bytes, timestamp: str | None, signature: str | None
    ) -> list[Channel]: ...
    async def person(self, channel: Channel, user: str) -> tuple[str, str] | None: ...
    async def reply(self, url: str, lines: Sequence[str]) -> None: ...
    async def update_message(self, url: str, snapshot: JobSnapshot) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NewSlackLink:
    """Properties of a new link.

    `team` None: the caller's own. `channel`: names the workspace; None: any of the team's.
    """

    team: str | None
    user: str
    owner: str
    scopes: tuple[Scope, ...]
    channel: str | None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A click or a slash command, by HTTP or Socket Mode. `channels`: those of the Slack app that sent it."""

    channels: Sequence[Channel]
    workspace: str
    user: str
    conversation: str
    answer_to: str
    action: str = ""
    value: str = ""
    text: str = ""

    @classmethod
    def of(cls, channels: Sequence[Channel], payload: Mapping[str, Any]) -> "Sent | None":
        """Return the request in a payload, or None for a kind that gpubroker does not use.

        Raises InvalidInput for a malformed payload.
        """
        try:
            if payload.get("command"):
                return cls(
                    channels=channels, workspace=str(payload["team_id"]), user=str(payload["user_id"]),
                    conversation=str(payload["channel_id"]), answer_to=str(payload["response_url"]),
                    text=str(payload.get("text", "")),
                )  # fmt: skip
            if payload.get("type") != "block_actions" or not payload["actions"]:
                return None
            action, user = payload["actions"][0], payload["user"]
            return cls(
                channels=channels, workspace=str((payload.get("team") or {}).get("id") or user["team_id"]),
                user=str(user["id"]), conversation=str((payload.get("channel") or {}).get("id", "")),
                answer_to=str(payload["response_url"]), action=str(action["action_id"]),
                value=str(action.get("value", "")),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, IndexError):
            raise InvalidInput(
                Problem(field="payload", message="is not a payload of Slack; nothing was done")
            ) from None


class Slack:
    """Use cases of Slack. `adapter` None: the daemon has no Slack."""

    def __init__(self, service: Service, adapter: SlackAdapter | None) -> None:
        self._service = service
        self._adapter = adapter
        self._acts = SlackActions(service)
        self._channels: tuple[float, Sequence[Channel]] = (float("-inf"), ())
        self._tasks: set[asyncio.Task[None]] = set()

    # ----------------------------------------------------------------------------------------------------------- links

    async def links(self, caller: Caller) -> Sequence[SlackUser]:
        """List the links of the caller's team; for an operator all links."""
        return await self._service.rows(caller).slack_users()

    async def link(self, caller: Caller, wish: NewSlackLink) -> SlackUser:
        """Look up a user in Slack and store the link.

        Raises InvalidInput, Forbidden; Conflict if Slack cannot be asked.
        """
        if beyond := ungrantable_scopes(caller.scopes, wish.scopes):
            raise Forbidden(f"you may not give the scope {beyond[0]!r}, which your own token lacks; ask an operator")
        team, rows = wish.team or caller.team, self._service.rows(caller)
        if all(known_team.name != team for known_team in await rows.teams()):
            raise InvalidInput(Problem(field="team", message=f"no team {team}; `gpubroker team ls` lists yours"))
        visible = [status.channel for status in await rows.channels()]
        channel = _of_team([c for c in visible if c.kind == KIND], team, wish.channel)
        try:
            profile = await self._required_adapter.person(channel, wish.user)
        except NotifyError as e:
            raise Conflict(f"{e}; nothing was linked") from None
        if profile is None:
            message = f"no {wish.user} in that workspace; a profile in Slack shows its member ID"
            raise InvalidInput(Problem(field="user", message=message))
        user_link = SlackUser(
            team=team, workspace=profile[0], user=wish.user, owner=wish.owner, scopes=wish.scopes, name=profile[1],
            linked_by=caller.owner,
        )  # fmt: skip
        await rows.put_slack_user(user_link)
        return user_link

    async def unlink(self, caller: Caller, user: str) -> None:
        """Remove a user's links in every workspace. Raises NotFound, Forbidden."""
        rows = self._service.rows(caller)
        links = await rows.slack_users(user=user)
        if not links:
            raise NotFound(f"no link of {user}; `gpubroker slack ls` lists them")
        for link in links:
            if beyond := ungrantable_scopes(caller.scopes, link.scopes):
                raise Forbidden(f"you may not take the scope {beyond[0]!r}, which your own token lacks")
            await rows.delete_slack_user(link)

    # ------------------------------------------------------------------------------------------------ received calls

    async def accept(self, body: bytes, timestamp: str | None, signature: str | None) -> None:
        """Accept a request that Slack signed; it is carried out after this returns.

        Raises InvalidInput, Unauthenticated for an invalid signature, and Conflict for a repeated request.
        """
        signers = self._required_adapter.signers(await self.channels(), body, timestamp, signature)
        if not signers:
            raise Unauthenticated("not signed by a Slack app of any channel here within the last five minutes")
        key = hashlib.sha256(f"{timestamp} {signature}".encode()).hexdigest()
        if not await self._service.store.first_time(f"slack:{key}", for_s=REPLAY_S):
            raise Conflict("this request was answered before; nothing was done")
        self._begin(Sent.of(signers, _payload(body)))

    async def take(self, channels: Sequence[Channel], envelope: str, payload: Mapping[str, Any]) -> None:
        """Accept a request from Socket Mode, which repeats an envelope until it is acknowledged."""
        if await self._service.store.first_time(f"slack:{envelope}", for_s=REPLAY_S):
            self._begin(Sent.of(channels, payload))

    def _begin(self, sent: Sent | None) -> None:
        """Start to carry out a request in the background.

        Slack waits three seconds for the first answer, so the result goes to `answer_to`.
        """
        if sent is not None:
            task = asyncio.create_task(self._carry_out(sent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for running requests to finish."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def channels(self) -> Sequence[Channel]:
        """Return the enabled Slack channels of every team."""
        now = self._service.clock.monotonic()
        if now - self._channels[0] >= CHANNELS_S:
            all_channels = [status.channel for status in await self._service.store.channels()]
            self._channels = now, [c for c in all_channels if c.kind == KIND and c.enabled]
        return self._channels[1]

    async def _carry_out(self, sent: Sent) -> None:
        try:
            await self._act(sent)
        except GpubrokerError as e:
            await self._required_adapter.reply(sent.answer_to, [str(e)])
        except Exception:
            log.exception("a request of Slack failed")
            await self._required_adapter.reply(
                sent.answer_to, ["an internal error of the broker; its log has the details"]
            )

    async def _act(self, sent: Sent) -> None:
        caller = await self._caller(sent)
        if caller is None:
            await self._required_adapter.reply(
                sent.answer_to,
                [
                    "You are not linked to a gpubroker user yet.",
                    f"Ask a user with the scope manage to run: gpubroker slack link {sent.user} --owner NAME",
                ],
            )
        elif not sent.action:
            await self._required_adapter.reply(sent.answer_to, await self._acts.command(caller, sent.text) or HELP)
        else:
            await self._press(caller, sent)

    async def _press(self, caller: Caller, sent: Sent) -> None:
        """Carry out a click, then show the current job in the message, so that stale buttons disappear."""
        try:
            _, message = await self._acts.press(caller, sent.action, sent.value)
        except GpubrokerError as e:
            message = str(e)
        await self._required_adapter.reply(sent.answer_to, [message])
        if not may(caller, "read"):
            return  # the channel itself updates the message
        try:
            job = await self._service.job(caller, JobId(sent.value.partition(":")[0]))
        except NotFound:
            return
        attempts = await self._service.attempts(caller, job)
        await self._required_adapter.update_message(sent.answer_to, JobSnapshot(job=job, attempts=tuple(attempts)))

    async def _caller(self, sent: Sent) -> Caller | None:
        """Return the caller that a Slack user acts as, or None for a user without a link.

        A team that knows its app's secrets can impersonate the app's users. Links of other teams and the scope `admin`
        are therefore excluded, unless a channel of the app belongs to the installation.

        Raises Conflict if the user is linked in several teams and the conversation belongs to none or several of them.
        Raises Forbidden if all of the owner's tokens have expired.
        """
        teams = {channel.team for channel in sent.channels}
        links = await self._service.store.slack_users(sent.workspace, sent.user)
        links = [link for link in links if None in teams or link.team in teams]
        if len(links) > 1:
            here = {c.team for c in sent.channels if c.config.get("channel") == sent.conversation}
            links = [link for link in links if link.team in here]
            if len(links) != 1:
                raise Conflict("you are linked in several teams; use the channel of the team that you mean")
        if not links:
            return None
        await self._check_owner_active(links[0])
        scopes = frozenset(links[0].scopes) - (frozenset() if None in teams else {"admin"})
        token = f"slack:{sent.workspace}/{sent.user}"
        return Caller(team=links[0].team, owner=links[0].owner, scopes=scopes, token_id=token)

    async def _check_owner_active(self, link: SlackUser) -> None:
        """Raise Forbidden if all tokens of the link's owner have expired. A link outlives the user who created it."""
        tokens = await self._service.store.as_tenant(Tenant(team=link.team, owner=link.owner)).tokens()
        ends = [token.expires_at for token in tokens if token.owner == link.owner and token.team == link.team]
        if (since := last_expiry(ends, self._service.clock.now())) is not None:
            raise Forbidden(
                f"the access of {link.owner} to gpubroker ended on {since:%Y-%m-%d}; "
                f"ask a user with the scope manage to run: gpubroker token new {link.owner}"
            )

    @property
    def _required_adapter(self) -> SlackAdapter:
        if self._adapter is None:
            raise NotFound("this daemon has no Slack")
        return self._adapter


def _payload(body: bytes) -> Mapping[str, Any]:
    """Return the form that Slack sent: a command's fields, or the JSON in `payload`. Raises InvalidInput."""
    try:
        form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FIELDS, strict_parsing=True))
        payload = json.loads(form["payload"]) if "payload" in form else form
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise InvalidInput(Problem(field="body", message="is not a form of Slack; nothing was done"))
    return payload


def _of_team(channels: Sequence[Channel], team: str, name: str | None) -> Channel:
    """Return the channel that names the workspace. Raises InvalidInput."""
    candidates = [c for c in channels if c.enabled and c.team in (team, None) and name in (None, c.name)]
    if not candidates:
        message = (
            f"no Slack channel{f' {name}' if name else ''} of team {team}; add one with gpubroker channel add slack"
        )
        raise InvalidInput(Problem(field="channel", message=message))
    return min(candidates, key=lambda c: (c.team is None, c.name))
