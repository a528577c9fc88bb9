"""Commands on notification channels: webhooks and Slack."""

import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table

from broker.api.schemas.channels import ChannelChange, ChannelRequest, ChannelTested, ChannelView
from broker.cli.core.command import Json, client, command, interruptible
from broker.cli.core.exit_codes import BadInput, Exit, NotFoundExit
from broker.cli.core.output import Output
from broker.cli.core.usage_errors import checked
from broker.client.async_client import AsyncClient

SECRETS = {"webhook": ("url",), "slack": ("bot_token", "signing_secret", "app_token")}
"""Secrets of a channel, by its kind; only the first is required."""
OPTIONS = {"name": "NAME", "events": "--event", "config": "--channel", "team": "--team"}
Channel = Annotated[str, typer.Argument(help="Name or id of the channel.")]
Events = Annotated[
    list[str] | None,
    typer.Option("--event", metavar="KIND", help="Event kind, e.g. job.succeeded, or a group: attempt.*. Repeatable."),
]


@command
async def add(
    kind: Annotated[str, typer.Argument(help="webhook or slack.")],
    name: Annotated[str, typer.Argument(help="Name of the new channel.")],
    event: Events = None,
    channel: Annotated[str | None, typer.Option(help="Slack only: id of the Slack channel, C….")] = None,
    team: Annotated[str | None, typer.Option(help="Add it to another team (operators only).")] = None,
    installation: Annotated[
        bool, typer.Option("--installation", help="Receive the events of every team (operators only).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add a channel. Secrets (webhook url, Slack bot_token) are prompted for, or read from stdin as NAME=VALUE."""
    out = Output(as_json=as_json)
    if kind not in SECRETS:
        raise BadInput(f"{kind}: use one of {', '.join(SECRETS)}")
    values = {"kind": kind, "name": name, "team": team, "installation": installation, "events": event or ()}
    config = {} if channel is None else {"channel": channel}
    request = checked(ChannelRequest, {**values, "config": config, "secrets": _secrets(SECRETS[kind])}, OPTIONS)
    async with client() as c:
        created = await c.create_channel(request)
    out.document(created)
    out.print(f"channel {created.name} ({created.id}) added; test it: gpubroker channel test {created.name}")
    if created.secret is not None:
        out.secret("signing secret, with which the receiver checks signatures (shown only once):", created.secret)


def _secrets(names: Iterable[str]) -> dict[str, str]:
    if not sys.stdin.isatty():
        return _lines(sys.stdin.read())
    secrets: dict[str, str] = {}
    with interruptible():
        for place, name in enumerate(names):
            hint = "" if place == 0 else " (optional; Enter to skip)"
            value = str(typer.prompt(f"{name}{hint}", hide_input=True, default="", show_default=False))
            secrets |= {name: value} if value else {}
    return secrets


def _lines(text: str) -> dict[str, str]:
    """Parse lines `NAME=VALUE`. Raises BadInput, whose message repeats no value."""
    secrets: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, sign, value = line.partition("=")
        if not line.strip():
            continue
        if not sign:
            raise BadInput(f"stdin, line {number}: not of the form NAME=VALUE, e.g. url=https://…")
        secrets[name.strip()] = value.strip()
    return secrets


@command
async def ls(as_json: Json = False) -> None:
    """List channels, with their pending and dropped notifications."""
    out = Output(as_json=as_json)
    async with client() as c:
        page = await c.channels()
    out.document(page)
    table = Table()
    for name in ("name", "kind", "team", "to", "events", "pending", "dropped", "state"):
        table.add_column(name)
    for channel in page.items:
        to, events = " ".join(map(str, channel.config.values())), ", ".join(channel.events) or "all"
        pending, dropped, state = _pending(channel), _dropped(channel), _state(channel)
        table.add_row(channel.name, channel.kind, channel.team or "(installation)", to, events, pending, dropped, state)
    out.print(table)


def _pending(channel: ChannelView) -> str:
    return f"{channel.waiting}, for {_age(channel.oldest_s)}" if channel.waiting else "0"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _dropped(channel: ChannelView) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(channel.dropped.items())) or "0"


def _state(channel: ChannelView) -> str:
    if not channel.enabled:
        return f"disabled: {channel.reason}"
    return f"{channel.failures} consecutive failures: {channel.reason}" if channel.failures else "ok"


@command
async def show(channel: Channel, as_json: Json = False) -> None:
    """Show one channel."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await _channel(c, channel)
    out.document(view)
    out.print(
        f"{view.name} ({view.id}), {view.kind}, {'team ' + view.team if view.team else 'every team'}",
        f"to       {' '.join(map(str, view.config.values())) or 'the log of the daemon'}",
        f"events   {', '.join(view.events) or 'all'}",
        f"pending  {_pending(view)}",
        f"dropped  {_dropped(view)}",
        f"state    {_state(view)}",
    )


@command
async def try_out(
    channel: Annotated[
        str | None, typer.Argument(help="Name or id of the channel. Default: every enabled channel.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send a test message through one channel, or through every enabled channel."""
    out = Output(as_json=as_json)
    async with client() as c:
        if channel is not None:
            channels = [await _channel(c, channel)]
        else:
            channels = [view for view in (await c.channels()).items if view.enabled]
        if not channels:
            raise BadInput("no channel is enabled; add one: gpubroker channel add webhook NAME")
        results = [await c.test_channel(view.id) for view in channels]
    tests = list(zip(channels, results, strict=True))
    out.document([{"channel": view.name, **result.model_dump()} for view, result in tests])
    for view, result in tests:
        out.print(f"{view.name}: {_test_message(result)}")
    if not all(result.delivered for result in results):
        raise typer.Exit(Exit.JOB_FAILED)


def _test_message(result: ChannelTested) -> str:
    return f"delivered in {result.seconds:.1f} s" if result.delivered else f"not delivered: {result.detail}"


@command
async def enable(channel: Channel, as_json: Json = False) -> None:
    """Enable a channel: reset its failure count and deliver pending notifications."""
    await _switch(channel, True, as_json)


@command
async def disable(channel: Channel, as_json: Json = False) -> None:
    """Disable a channel. Pending notifications are kept for a week; new events are not sent."""
    await _switch(channel, False, as_json)


async def _switch(channel: str, enabled: bool, as_json: bool) -> None:
    out = Output(as_json=as_json)
    async with client() as c:
        view = await _channel(c, channel)
        changed = await c.change_channel(view.id, ChannelChange(enabled=enabled))
    out.document(changed)
    out.print(f"channel {changed.name} is {'enabled' if changed.enabled else 'disabled'}; {changed.waiting} pending")


@command
async def events(channel: Channel, event: Events = None, as_json: Json = False) -> None:
    """Choose the events that a channel receives; without --event it receives all."""
    out = Output(as_json=as_json)
    change = checked(ChannelChange, {"events": event or ()}, OPTIONS)
    async with client() as c:
        view = await _channel(c, channel)
        changed = await c.change_channel(view.id, change)
    out.document(changed)
    out.print(f"channel {changed.name} receives {', '.join(changed.events) or 'all events'}")


@command
async def rotate(channel: Channel, as_json: Json = False) -> None:
    """Create a new signing secret for a webhook; the old secret stays valid for one day."""
    out = Output(as_json=as_json)
    async with client() as c:
        changed = await c.rotate_channel((await _channel(c, channel)).id)
    out.document(changed)
    out.secret("new signing secret (shown only once); the old secret stays valid for one day:", changed.secret or "")


@command
async def remove(channel: Channel, as_json: Json = False) -> None:
    """Remove a channel with its pending notifications."""
    out = Output(as_json=as_json)
    async with client() as c:
        view = await _channel(c, channel)
        await c.delete_channel(view.id)
    out.document({"removed": view.id})
    out.print(f"channel {view.name} removed")


async def _channel(c: AsyncClient, name: str) -> ChannelView:
    """Return the channel with this id or name. Raises NotFoundExit, and BadInput if several channels match."""
    matching = [view for view in (await c.channels()).items if name in (view.id, view.name)]
    if not matching:
        raise NotFoundExit(f"no channel {name}; `gpubroker channel ls` lists channels")
    if len(matching) > 1:
        raise BadInput(f"several channels are named {name}; give the id: {', '.join(view.id for view in matching)}")
    return matching[0]
