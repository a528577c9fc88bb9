"""Use cases of teams, tokens and the audit."""

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import UUID

from broker.api.core.auth import Caller, Forbidden, hashed, mint
from broker.api.core.problems import Conflict, NotFound
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import base32
from broker.domain.tenancy import AuditEntry, Scope, Team, is_permanent_team, ungrantable_scopes
from broker.ports import AuditFilter, Clock, Store, Token


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """Properties of a new token. `team` None: the caller's own. `key`: a repeat with the same key creates nothing."""

    team: str | None
    owner: str
    scopes: tuple[Scope, ...]
    expires_at: datetime | None
    note: str
    key: str | None = None


def _id_of_key(caller: Caller, key: str) -> str:
    """Return the id of the token that this caller creates with this idempotency key."""
    return base32(hashlib.sha256("\0".join((caller.team, caller.owner, key)).encode()).digest()[:5], 8)


@dataclass(frozen=True, kw_only=True)
class AuditEntries:
    entries: Sequence[AuditEntry]
    next: str | None


class Tenancy:
    """Use cases of teams and tokens. `entropy(n)` returns n random bytes."""

    def __init__(self, store: Store, clock: Clock, entropy: Callable[[int], bytes]) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy

    # ---------------------------------------------------------------------------------------------------------- tokens

    async def tokens(self, caller: Caller) -> Sequence[Token]:
        """List the tokens of the caller's team; for an operator all tokens."""
        return await self._store.as_tenant(caller.tenant).tokens()

    async def create_token(self, caller: Caller, wish: NewToken) -> tuple[Token, str]:
        """Return (the token, its text, which is not stored). Raises Forbidden, InvalidInput, Conflict."""
        _check_scopes(caller, wish.scopes, "give")
        team = wish.team or caller.team
        rows = self._store.as_tenant(caller.tenant)
        if all(known_team.name != team for known_team in await rows.teams()):
            raise InvalidInput(Problem(field="team", message=f"no team {team}; `gpubroker team ls` lists yours"))
        if wish.expires_at is not None and wish.expires_at <= self._clock.now():
            raise InvalidInput(Problem(field="expires_at", message="is in the past; give a future time"))
        last = caller.expires_at
        if last is not None and wish.expires_at is not None and wish.expires_at > last:
            message = f"is after the end of the token that asks, {last:%Y-%m-%d %H:%M:%S} UTC; give an earlier time"
            raise InvalidInput(Problem(field="expires_at", message=message))
        token_id, text = mint(self._entropy)
        if wish.key is not None:
            token_id = _id_of_key(caller, wish.key)
            text = f"gb_{token_id}_{text.rpartition('_')[2]}"
        token = Token(
            id=token_id,
            team=team,
            owner=wish.owner,
            scopes=wish.scopes,
            created_at=self._clock.now(),
            expires_at=wish.expires_at or last,  # a token that expires cannot create one that outlives it
            note=wish.note,
        )
        if not await rows.put_token(token, hashed(text)):
            message = f"token {token_id} was created already, and its text was shown once; revoke it if that is lost"
            raise Conflict(message)
        return token, text

    async def delete_token(self, caller: Caller, token_id: str) -> None:
        """Revoke a token. Raises NotFound, Forbidden."""
        rows = self._store.as_tenant(caller.tenant)
        token = next((candidate for candidate in await rows.tokens() if candidate.id == token_id), None)
        if token is not None:
            _check_scopes(caller, token.scopes, "revoke")
        if token is None or not await rows.delete_token(token_id):
            raise NotFound(f"no token {token_id}; `gpubroker token ls` lists them")

    # ----------------------------------------------------------------------------------------------------------- teams

    async def teams(self, caller: Caller) -> Sequence[Team]:
        """List the caller's team; for an operator all teams."""
        return await self._store.as_tenant(caller.tenant).teams()

    async def create_team(self, caller: Caller, name: str, note: str) -> Team:
        """Create a team (operators only). Raises Conflict."""
        team = await self._store.as_tenant(caller.tenant).put_team(name, note)
        if team is None:
            raise Conflict(f"there is a team {name} already; choose another name")
        return team

    async def delete_team(self, caller: Caller, name: str) -> None:
        """Delete a team (operators only). Raises NotFound, Conflict, InUse."""
        if is_permanent_team(name):
            raise Conflict(f"the team {name} has the operator's own token; it stays")
        if not await self._store.as_tenant(caller.tenant).delete_team(name):
            raise NotFound(f"no team {name}; `gpubroker team ls` lists them")

    # ----------------------------------------------------------------------------------------------------------- audit

    async def audit(self, caller: Caller, where: AuditFilter, cursor: str | None) -> AuditEntries:
        """Return a page of the audit, newest first. `where.team` is ignored unless the caller is an operator."""
        narrowed = replace(
            where,
            team=where.team if caller.admin else caller.team,
            before=None if cursor is None else _read_cursor(cursor),
        )
        entries = await self._store.as_tenant(caller.tenant).audit(narrowed)
        full = len(entries) == where.limit
        return AuditEntries(entries=entries, next=_cursor(entries[-1]) if full else None)


def _check_scopes(caller: Caller, scopes: Sequence[str], doing: str) -> None:
    """Raise Forbidden if a caller would grant or revoke a scope that its own token lacks."""
    beyond = ungrantable_scopes(caller.scopes, scopes)
    if beyond:
        raise Forbidden(f"you may not {doing} the scope {beyond[0]!r}, which your own token lacks; ask an operator")


def _cursor(entry: AuditEntry) -> str:
    at = entry.at.isoformat() if entry.at else ""
    return base64.urlsafe_b64encode(f"{at} {entry.id}".encode()).decode().rstrip("=")


def _read_cursor(text: str) -> tuple[datetime, str]:
    try:
        when, _, entry = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().partition(" ")
        return datetime.fromisoformat(when).astimezone(UTC), str(UUID(entry))
    except (binascii.Error, ValueError, OverflowError):
        raise InvalidInput(Problem(field="cursor", message="is not one of ours; take `next` of a page")) from None
