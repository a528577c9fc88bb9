"""`gpubroker web`: the pages in a browser."""

import asyncio
import webbrowser
from html import escape
from typing import Annotated

import typer

from broker.cli.commands.setup import is_this_host
from broker.cli.core.command import Json, client, command
from broker.cli.core.output import Output
from broker.client.async_client import AsyncClient
from broker.paths import default_home
from broker.runtime.private_files import write_private

PAGES = "/ui"
PAGE = "web.html"
"""File in the home that the browser opens."""
FORWARD = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={url}">'
    '<p><a href="{url}">gpubroker</a></p>\n'
)


@command
async def web(
    print_only: Annotated[bool, typer.Option("--print", help="Print the link, and open no browser.")] = False,
    as_json: Json = False,
) -> None:
    """Open the web pages in a browser, on the daemon's own machine signed in."""
    out = Output(as_json=as_json)
    async with client() as c:
        url = await link(c)
    out.document({"url": url})
    if print_only or as_json or not await asyncio.to_thread(_opened, url):
        out.print(url)
        return
    out.print("opened the pages in your browser; `gpubroker web --print` prints a link instead")


def _opened(url: str) -> bool:
    """Open a private file that leads to the link, because other users can read a browser's arguments."""
    path = default_home() / PAGE
    try:
        write_private(path, FORWARD.format(url=escape(url)).encode())
    except OSError:
        return False
    return webbrowser.open(path.as_uri())


async def link(c: AsyncClient) -> str:
    """Return a link that signs in once within a minute.

    For a daemon on another machine, return its page that takes a token.
    """
    if not is_this_host(c.url):
        return c.url + PAGES
    return c.url + (await c.sign_in_link()).path
