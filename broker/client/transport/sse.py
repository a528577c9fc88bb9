"""Parser of server-sent events (WHATWG HTML, 9.2)."""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

END = "end"
"""Event with which the server ends a stream. A stream that ends without this event was cut."""


@dataclass(frozen=True, kw_only=True)
class ReceivedEvent:
    """One event. `id` is the value of `Last-Event-ID` for a resume."""

    event: str
    data: str
    id: str


async def messages(lines: AsyncIterable[bytes]) -> AsyncIterator[ReceivedEvent]:
    """Yield complete events. An incomplete event of a broken connection is dropped; a resumed stream repeats it."""
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
