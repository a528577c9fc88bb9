"""Server-sent events (WHATWG HTML, 9.2), read from a stream of lines."""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

END = "end"
"""The server's word that all is said; a stream that ends without it was cut."""


@dataclass(frozen=True, kw_only=True)
class ReceivedEvent:
    """One event; `id` is what `Last-Event-ID` resumes after."""

    event: str
    data: str
    id: str


async def messages(lines: AsyncIterable[bytes]) -> AsyncIterator[ReceivedEvent]:
    """Whole events only: what a broken connection cut off is dropped, and comes again after a resume."""
    event, identity, data = "message", "", list[str]()
    async for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield ReceivedEvent(event=event, data="\n".join(data), id=identity)
            event, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            event = value
        elif name == "id":
            identity = value
