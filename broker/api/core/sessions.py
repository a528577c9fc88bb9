"""Sessions of browsers: sealed cookies that are bound to a token, and one-time sign-in codes.

A cookie carries only the token's digest, so every request looks the token up: a revoked token ends its sessions.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.fernet import Fernet, InvalidToken

from broker.api.core.auth import TokenDigest
from broker.domain.ids import base32
from broker.ports import Clock, Store
from broker.runtime.secret_box import SecretBox

SESSION_S = 12 * 3600
"""Seconds from a sign-in to the end of its session."""
CODE_S = 60
"""Seconds for which a sign-in code may be used."""
CODES = 4096
"""Largest number of unused sign-in codes; the oldest are dropped."""
CODES_OF_TOKEN = 4
"""Largest number of unused sign-in codes of one token, so that no caller drops the codes of another."""
CHECKED = 4096
"""Largest number of remembered answers of the database."""
ENDED = 4096
"""Largest number of remembered sign-outs at this broker; a look-up that runs meanwhile takes less time than so many."""
CHECK_S = 5.0
"""Seconds for which a session that was not signed out is not looked up again; the age of a cached token too."""
COOKIE_BYTES = 1024
"""Longest cookie that is opened."""


@dataclass(frozen=True, kw_only=True)
class BrowserSession:
    """One signed-in browser."""

    id: str
    """Random at each sign-in."""
    token: TokenDigest
    started_at: datetime


class WebSessions:
    """Seals and opens session cookies, and keeps the sign-in codes of this process. Sign-outs are in the store."""

    def __init__(self, box: SecretBox, clock: Clock, entropy: Callable[[int], bytes], store: Store) -> None:
        """`entropy(n)` returns n random bytes."""
        self._store = store
        self._fernet = Fernet(box.session_key())
        self._clock = clock
        self._entropy = entropy
        self._codes: OrderedDict[str, tuple[TokenDigest, datetime]] = OrderedDict()
        self._checked: OrderedDict[str, float] = OrderedDict()
        """Monotonic time at which a session was last found not signed out, by its id."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Ids of the sessions that ended here; the database has all."""

    def start(self, token: TokenDigest) -> str:
        """Return the cookie of a new session, which no earlier cookie equals."""
        content = {"id": self._random(), "token": token.sha256, "at": self._clock.now().timestamp()}
        return self._fernet.encrypt(json.dumps(content).encode()).decode()

    async def open(self, cookie: str) -> BrowserSession | None:
        """Return the session of a cookie; None: forged, older than `SESSION_S`, or signed out.

        A sign-out at another broker counts here after at most `CHECK_S`. Raises StoreUnavailable.
        """
        session = self._unsealed(cookie)
        if session is None:
            return None
        checked_at, now = self._checked.get(session.id), self._clock.monotonic()
        if checked_at is None or now - checked_at >= CHECK_S:
            is_ended = await self._store.is_session_ended(session.id)
            if is_ended or session.id in self._ended:  # it may have ended here while the database answered
                self._checked.pop(session.id, None)
                return None
            self._checked[session.id] = now
            while len(self._checked) > CHECKED:
                self._checked.popitem(last=False)
        return session

    def _unsealed(self, cookie: str) -> BrowserSession | None:
        if len(cookie) > COOKIE_BYTES:
            return None
        try:
            content = json.loads(self._fernet.decrypt(cookie.encode()))
        except (InvalidToken, ValueError):
            return None
        now = self._clock.now()
        started = datetime.fromtimestamp(content["at"], now.tzinfo)
        if not timedelta(0) <= now - started < timedelta(seconds=SESSION_S):
            return None
        return BrowserSession(id=content["id"], token=TokenDigest(content["token"]), started_at=started)

    async def end(self, session: BrowserSession) -> None:
        """Refuse the session's cookie from now on, at every broker and after a restart. Raises StoreUnavailable."""
        await self._store.end_session(session.id, for_s=SESSION_S)
        self._ended[session.id] = None
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        self._checked.pop(session.id, None)

    def code(self, token: TokenDigest) -> tuple[str, datetime]:
        """Return (a sign-in code, its expiry)."""
        code, until = self._random(), self._clock.now() + timedelta(seconds=CODE_S)
        own = [name for name, (owner, _) in self._codes.items() if owner == token]
        for name in own[: max(0, len(own) + 1 - CODES_OF_TOKEN)]:
            del self._codes[name]
        self._codes[code] = (token, until)
        while len(self._codes) > CODES:
            self._codes.popitem(last=False)
        return code, until

    def peek(self, code: str) -> TokenDigest | None:
        """Return the token of a sign-in code that may still be used; None: unknown, used or expired."""
        token, until = self._codes.get(code, (None, None))
        return token if until is not None and self._clock.now() < until else None

    def redeem(self, code: str) -> TokenDigest | None:
        """Return the token of a sign-in code, once; None: unknown, used or expired."""
        token = self.peek(code)
        self._codes.pop(code, None)
        return token

    def _random(self) -> str:
        return base32(self._entropy(20), 32)
