"""Whose machines a cloud lists: a key of another account lists nothing, which must not pass for absent.

The account that a cloud was first asked under is kept in a file. While another one is asked, nothing is listed, sold,
bought or destroyed: machines of the first go on billing there, unseen.
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
"""Characters of a mark that people are shown; none of them is secret."""


class Owned(Protocol):
    """What a cloud's native half tells of its credentials."""

    @property
    def name(self) -> str: ...
    async def credential(self) -> str:
        """Digest of the credentials as they lie there now; behind a `/`, the key that was got by them, where that may
        change while they do not. Raises Rejected where there are none.
        """
        ...

    async def account(self) -> Sequence[str]:
        """Marks of the account that they belong to, the first for people; two accounts have none in common, two
        answers about one account have at least one. The credentials are read anew. Raises as `list` does.
        """
        ...


class Account:
    """The account of one cloud that this installation belongs to, remembered in `file`."""

    def __init__(self, cloud: Owned, file: Path) -> None:
        self._cloud, self._file = cloud, file
        self._known: str | None = None
        """Digest of the credentials that are known to be of that account."""
        self._again = False
        self._turn = asyncio.Lock()

    def owns(self, digest: str) -> bool:
        """Whether credentials with this digest are known to be of the account."""
        return self._known is not None and _digest(self._known) == digest

    def bought(self) -> None:
        """Something may have been bought, and the account bear another mark since: it is asked for it once more."""
        self._again = True

    async def verify(self) -> str:
        """Digest of the credentials, which are of the account. The cloud is asked when they have changed only.

        Raises OutcomeUnknown, in one line with the fix, when they are not; else what `Owned.account` raises.
        """
        async with self._turn:
            credential = await self._cloud.credential()
            if credential != self._known or self._again:
                self._again = False
                await self._ask(credential)
            return credential

    async def _ask(self, credential: str) -> None:
        if not self.owns(_digest(credential)):
            self._known = None
        marks = await self._cloud.account()
        await self._unchanged(credential)
        self._compare(marks)
        self._known = credential

    @asynccontextmanager
    async def same(self) -> AsyncIterator[None]:
        """What is asked inside is asked of the account, or raises OutcomeUnknown."""
        credential = await self.verify()
        try:
            yield
        except Gone:
            await self._still(credential)  # another account has none of our machines
            raise
        await self._still(credential)

    async def _still(self, credential: str) -> None:
        """A key that was renewed is as good where it is of the account: those between the two were so as well."""
        if await self._unchanged(credential) != credential:
            await self.verify()

    async def _unchanged(self, credential: str) -> str:
        """The credentials now, which differ in the key at most."""
        now = await self._cloud.credential()
        if _digest(now) != _digest(credential):
            raise OutcomeUnknown(f"{self._cloud.name}: the credentials were exchanged meanwhile; it is asked again")
        return now

    def _compare(self, marks: Sequence[str]) -> None:
        known = self._read()
        if known and not set(known) & set(marks):
            self._known = None
            raise OutcomeUnknown(
                f"{self._cloud.name}: the credentials are of account {_shown(marks)}, the jobs' machines of "
                f"{_shown(known)}; put the old ones back until all jobs have ended, or remove {self._file}"
            )
        if list(marks) != known:
            write_private(self._file, json.dumps({"account": list(marks)}).encode(), durable=True)

    def _read(self) -> list[str]:
        """Empty: none was seen yet."""
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


def _shown(marks: Sequence[str]) -> str:
    first = marks[0]
    return first if len(first) <= SHOWN else f"{first[:SHOWN]}…"
