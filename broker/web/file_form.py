"""Multipart forms that end with one file, which is read as a stream."""

import asyncio
from collections.abc import AsyncIterator

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from broker.domain.errors import InvalidInput, Problem

CHUNK = 1 << 16
FILE_S = 30.0
"""Seconds from a form's head to the head of its file; then the limits of every upload apply."""
FIELDS, FIELD_BYTES = 8, 1024
"""Maximum number of fields before the file, and bytes of each."""


async def form_with_file(request: web.Request, field: str) -> tuple[dict[str, str], BodyPartReader]:
    """Return (the fields before the file, the file's part, named `file`). `field`: field of the errors.

    Raises InvalidInput.
    """
    if request.content_type != "multipart/form-data":
        raise no_file(field)
    try:
        async with asyncio.timeout(FILE_S):
            return await _parts(request, field)
    except TimeoutError:
        message = f"the file did not begin within {FILE_S:g} s; send it again"
        raise InvalidInput(Problem(field=field, message=message)) from None
    except (ValueError, HttpProcessingError):
        raise no_file(field) from None


async def _parts(request: web.Request, field: str) -> tuple[dict[str, str], BodyPartReader]:
    fields: dict[str, str] = {}
    parts = await request.multipart()
    for _ in range(FIELDS + 1):
        part = await parts.next()
        if not isinstance(part, BodyPartReader) or not part.name:
            break
        if part.name == "file" and part.filename:
            return fields, part
        fields[part.name] = await _text(part)
    raise no_file(field)


async def _text(part: BodyPartReader) -> str:
    """Return the text of a field. Raises ValueError if it is too long or no UTF-8."""
    text = bytearray()
    while piece := await part.read_chunk(FIELD_BYTES):
        text += piece
        if len(text) > FIELD_BYTES:
            raise ValueError("a long field")
    return text.decode()


def no_file(field: str) -> InvalidInput:
    return InvalidInput(Problem(field=field, message="no file came; choose one"))


async def chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    """Yield the content of a file. Raises InvalidInput for a form that breaks off."""
    try:
        while chunk := await part.read_chunk(CHUNK):
            yield bytes(chunk)
    except (ValueError, HttpProcessingError):
        raise no_file("body") from None
