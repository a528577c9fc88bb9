"""Bounded reading of the forms that are sent without a session: sign-in and theme."""

import asyncio

from aiohttp import web

from broker.api.core.problems import Overloaded, TooLarge
from broker.domain.errors import InvalidInput, Problem

FORM_BYTES = 8 * 1024
FORM_S = 5.0
"""Seconds for the whole form to arrive."""
FORMS_AT_ONCE = 32
"""Maximum number of forms that are read at once: slow senders take only this part of the daemon's request slots."""


class AnonymousForms:
    """Reader of the forms of callers that are not authenticated yet."""

    def __init__(self) -> None:
        self.reading = 0
        """Number of forms that are arriving."""

    async def read(self, request: web.Request) -> bytes:
        """Return the body. Raises Overloaded, TooLarge, InvalidInput."""
        if self.reading >= FORMS_AT_ONCE:
            raise Overloaded(f"{FORMS_AT_ONCE} forms without a session are being read already; try again")
        self.reading += 1
        try:
            async with asyncio.timeout(FORM_S):
                return await _bounded(request)
        except TimeoutError:
            message = f"did not arrive within {FORM_S:g} s; send the form again"
            raise InvalidInput(Problem(field="body", message=message)) from None
        finally:
            self.reading -= 1


async def _bounded(request: web.Request) -> bytes:
    body = bytearray()
    while len(body) <= FORM_BYTES and (request.content_length or 0) <= FORM_BYTES:
        piece = await request.content.readany()
        if not piece:
            return bytes(body)
        body += piece
    raise TooLarge(f"the form has more than {FORM_BYTES} bytes; send less")


ANONYMOUS_FORMS = web.AppKey("anonymous_forms", AnonymousForms)
