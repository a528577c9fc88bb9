"""Commands on channels: where people and programs are told."""

import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table

from broker.api.schemas.channels import ChannelChange, ChannelRequest, ChannelTested, ChannelView
from broker.cli.core.command import Json, client, command, interruptible
from broker.cli.core.exit_codes import BadInput, Exit, NotFoundExit
from broker.cli.core.output import Output
from broker.cli.core.request_bodies import checked
from broker.client.async_client import AsyncClient

ASKED = {"webhook": ("url",), "slack": ("bot_token", "signing_secret", "app_token")}
"""Secrets by kind; only the first is needed."""
OPTIONS = {"name": "NAME", "events": "--event", "config": "--channel", "team": "--team"}
Channel = Annotated[str, typer.Argument(help="Name or id.")]
Events = Annotated[
    list[str] | None,
    typer.Option("--event", metavar="KIND", help="job.succeeded, or attempt.* for all that begin so. Repeat."),
]


@command
async def add(
    kind: Annotated[str, typer.Argument(help="webhook or slack.")],
    name: Annotated[str, typer.Argument(help="For people.")],
    event: Events = None,
    channel: Annotated[str | None, typer.Option(help="Of Slack: the id of its channel, C….")] = None,
    team: Annotated[str | None, typer.Option(help="Of another team; operators only.")] = None,
    installation: Annotated[
        bool, typer.Option("--installation", help="Of no team, and told about all; operators only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add a channel. Secrets (a webhook's url; Slack's bot_token) are asked for, or read from stdin as NAME=VALUE."""
    out = Output(as_json=as_json)
    if kind not in ASKED:
        raise BadInput(f"{kind}: use one of {', '.join(ASKED)}")
    wish = {"kind": kind, "name": name, "team": team, "installation": installation, "events": event or ()}
    config = {} if channel is None else {"channel": channel}
    request = checked(ChannelRequest, {**wish, "config": config, "secrets": _secrets(ASKED[kind])}, OPTIONS)
    async with client() as c:
        made = await c.create_channel(request)
    out.document(made)
    out.say(f"channel {made.name} ({made.id}) is added; try it: gpubroker channel test {made.name}")
    if made.secret is not None:
        out.secret("its receiver checks signatures with this secret, shown this once:", made.secret)


def _secrets(names: Iterable[str]) -> dict[str, str]:
    if not sys.stdin.isatty():
        return _lines(sys.stdin.read())
    found: dict[str, str] = {}
    with interruptible():
        for place, name in enumerate(names):
            hint = "" if place == 0 else " (Enter: none)"
            value = str(typer.prompt(f"{name}{hint}", hide_input=True, default="", show_default=False))
            found |= {name: value} if value else {}
    return found


def _lines(text: str) -> dict[str, str]:
    """`NAME=VALUE` a line. Raises BadInput without repeating a value."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, sign, value = line.partition("=")
        if not line.strip():
            continue
        if not sign:
            raise BadInput(f"stdin, line {number}: is not NAME=VALUE, e.g. url=https://…")
        found[name.strip()] = value.strip()
    return found


@command
async def ls(as_json: Json = False) -> None:
    """List channels, with what waits for them and what they missed."""
    out = Output(as_json=as_json)
    async with client() as c:
        found = await c.channels()
    out.document(found)
    table = Table()
    for name in ("name", "kind", "team", "to", "events", "waiting", "missed", "state"):
        table.add_column(name)
    for one in found.items:
        to, events = " ".join(map(str, one.config.values())), ", ".join(one.events) or "all"
        table.add_row(
            one.name, one.kind, one.team or "(installation)", to, events, _waiting(one), _missed(one), _state(one)
        )
    out.say(table)


def _waiting(one: ChannelView) -> str:
    return f"{one.waiting}, for {_age(one.oldest_s)}" if one.waiting else "0"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _missed(one: ChannelView) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(one.dropped.items())) or "0"


def _state(one: ChannelView) -> str:
    if not one.enabled:
        return f"disabled: {one.reason}"
    return f"{one.failures} failures in a row: {one.reason}" if one.failures else "ok"


@command
async def show(channel: Channel, as_json: Json = False) -> None:
    """Show one channel."""
    out = Output(as_json=as_json)
    async with client() as c:
        one = await _found(c, channel)
    out.document(one)
    out.say(
        f"{one.name} ({one.id}), {one.kind}, {'team ' + one.team if one.team else 'of the installation'}",
        f"to       {' '.join(map(str, one.config.values())) or 'the log of the daemon'}",
        f"events   {', '.join(one.events) or 'all'}",
        f"waiting  {_waiting(one)}",
        f"missed   {_missed(one)}",
        f"state    {_state(one)}",
    )


@command
async def try_out(
    channel: Annotated[str | None, typer.Argument(help="Name or id; every enabled one without it.")] = None,
    as_json: Json = False,
) -> None:
    """Send a real test message through one channel, or through every enabled one."""
    out = Output(as_json=as_json)
    async with client() as c:
        if channel is not None:
            chosen = [await _found(c, channel)]
        else:
            chosen = [one for one in (await c.channels()).items if one.enabled]
        if not chosen:
            raise BadInput("no channel is enabled; add one: gpubroker channel add webhook NAME")
        results = [await c.test_channel(one.id) for one in chosen]
    out.document([{"channel": one.name, **result.model_dump()} for one, result in zip(chosen, results, strict=True)])
    for one, result in zip(chosen, results, strict=True):
        _say(out, one, result)
    if not all(result.delivered for result in results):
        raise typer.Exit(Exit.JOB_FAILED)


def _say(out: Output, one: ChannelView, result: ChannelTested) -> None:
    if result.delivered:
        out.say(f"{one.name}: delivered in {result.seconds:.1f} s")
    else:
        out.say(f"{one.name}: not delivered: {result.detail}")


@command
async def enable(channel: Channel, as_json: Json = False) -> None:
    """Enable a channel: its failures are forgotten, and what waited is told."""
    await _switch(channel, True, as_json)


@command
async def disable(channel: Channel, as_json: Json = False) -> None:
    """Disable a channel: what waits is kept for a week, what happens meanwhile is not told."""
    await _switch(channel, False, as_json)


async def _switch(channel: str, enabled: bool, as_json: bool) -> None:
    out = Output(as_json=as_json)
    async with client() as c:
        one = await _found(c, channel)
        changed = await c.change_channel(one.id, ChannelChange(enabled=enabled))
    out.document(changed)
    out.say(f"channel {changed.name} is {'enabled' if changed.enabled else 'disabled'}; {changed.waiting} waiting")


@command
async def events(channel: Channel, event: Events = None, as_json: Json = False) -> None:
    """Choose what a channel is told; without --event everything."""
    out = Output(as_json=as_json)
    change = checked(ChannelChange, {"events": event or ()}, OPTIONS)
    async with client() as c:
        one = await _found(c, channel)
        changed = await c.change_channel(one.id, change)
    out.document(changed)
    out.say(f"channel {changed.name} is told {', '.join(changed.events) or 'everything'}")


@command
async def rotate(channel: Channel, as_json: Json = False) -> None:
    """Make a new signing secret for a webhook; the one before signs as well for a day."""
    out = Output(as_json=as_json)
    async with client() as c:
        made = await c.rotate_channel((await _found(c, channel)).id)
    out.document(made)
    out.secret("the new secret, shown this once; the one before is valid for another day:", made.secret or "")


@command
async def remove(channel: Channel, as_json: Json = False) -> None:
    """Remove a channel, with all that waits for it."""
    out = Output(as_json=as_json)
    async with client() as c:
        one = await _found(c, channel)
        await c.delete_channel(one.id)
    out.document({"removed": one.id})
    out.say(f"channel {one.name} is removed")


async def _found(c: AsyncClient, wanted: str) -> ChannelView:
    """By id or name. Raises NotFound, BadInput."""
    found = [one for one in (await c.channels()).items if wanted in (one.id, one.name)]
    if not found:
        raise NotFoundExit(f"no channel {wanted}; `gpubroker channel ls` shows yours")
    if len(found) > 1:
        raise BadInput(f"several channels are named {wanted}; give the id: {', '.join(one.id for one in found)}")
    return found[0]
