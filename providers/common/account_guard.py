"""Guard against credentials of another account, whose empty listing must not be taken as proof of absence.

A file stores the account of a cloud at its first use. While the credentials belong to another account, the broker
lists, offers, buys and destroys nothing there. The broker could not list the machines of the first account.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from broker.domain.errors import Gone, OutcomeUnknown
from broker.runtime.private_files import write_private

SHOWN = 16
"""Characters of an account mark that messages show; marks are not secret."""


class Owned(Protocol):
    """Part of a cloud's native API that identifies its credentials."""

    @property
    def name(self) -> str: ...
    async def credential(self) -> str:
        """Return a digest of the current credentials. Raises Rejected if there are none.

        A temporary key, which may change while the credentials stay the same, adds `/` and the key's id.
        """
        ...

    async def account(self) -> Sequence[str]:
        """Read the credentials again and return marks of their account. Raises the errors of `list`.

        Messages show the first mark. Two accounts never have a mark in common; two answers about one account always do.
        """
        ...


class Account:
    """Account of one cloud that this installation uses; `file` stores its marks."""

    def __init__(self, cloud: Owned, file: Path) -> None:
        self._cloud, self._file = cloud, file
        self._verified: str | None = None
        """Credentials that were verified to belong to the account; None: none yet."""
        self._must_verify = False
        self.mark = ""
        """First mark of the account as messages show it; empty: not verified yet."""
        self._lock = asyncio.Lock()

    def owns(self, digest: str) -> bool:
        """Return True if credentials with this digest were verified to belong to the account."""
        return self._verified is not None and _digest(self._verified) == digest

    def note_purchase(self) -> None:
        """Verify the account again before the next call, because a purchase may have changed its marks."""
        self._must_verify = True

    async def verify(self) -> str:
        """Return the credentials after checking their account. The cloud is called only if they have changed.

        Raises OutcomeUnknown, with the fix, for credentials of another account, and the errors of `Owned.account`.
        """
        async with self._lock:
            credential = await self._cloud.credential()
            if credential != self._verified or self._must_verify:
                self._must_verify = False
                await self._verify_account(credential)
            return credential

    async def _verify_account(self, credential: str) -> None:
        if not self.owns(_digest(credential)):
            self._verified = None
        marks = await self._cloud.account()
        await self._check_unchanged(credential)
        self._check_marks(marks)
        self._verified, self.mark = credential, _marks_text(marks)

    @asynccontextmanager
    async def same(self) -> AsyncIterator[None]:
        """Verify the account before and after the block.

        Raises OutcomeUnknown if a call within the block may have reached another account.
        """
        credential = await self.verify()
        try:
            yield
        except Gone:
            await self._recheck(credential)  # `Gone` proves nothing if the call reached another account
            raise
        await self._recheck(credential)

    async def _recheck(self, credential: str) -> None:
        """Verify the account again if the temporary key was renewed during the call.

        If the latest key belongs to the account, so did the keys before it.
        """
        if await self._check_unchanged(credential) != credential:
            await self.verify()

    async def _check_unchanged(self, credential: str) -> str:
        """Return the current credentials. Raises OutcomeUnknown if more than the temporary key has changed."""
        now = await self._cloud.credential()
        if _digest(now) != _digest(credential):
            raise OutcomeUnknown(
                f"{self._cloud.name}: the credentials changed during the call; the call will be repeated"
            )
        return now

    def _check_marks(self, marks: Sequence[str]) -> None:
        stored = self._stored_marks()
        if stored and not set(stored) & set(marks):
            self._verified = None
            raise OutcomeUnknown(
                f"{self._cloud.name}: the credentials belong to account {_marks_text(marks)}, the jobs' machines to "
                f"{_marks_text(stored)}; restore the old credentials until all jobs have ended, or remove {self._file}"
            )
        if list(marks) != stored:
            write_private(self._file, json.dumps({"account": list(marks)}).encode(), durable=True)

    def _stored_marks(self) -> list[str]:
        """Return the stored marks; empty before the first use."""
        try:
            return [str(mark) for mark in json.loads(self._file.read_bytes())["account"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise OutcomeUnknown(
                f"{self._cloud.name}: {self._file} cannot be read ({type(e).__name__}); correct or remove it"
            ) from None


def _digest(credential: str) -> str:
    return credential.partition("/")[0]


def _marks_text(marks: Sequence[str]) -> str:
    first = marks[0]
    return first if len(first) <= SHOWN else f"{first[:SHOWN]}…"
