"""Credentials of the blob store: given to an attempt at launch, and renewed at half of their life.

What is known of a grant is in `grant.json` itself: `seq` is the time of issue in milliseconds, so that half-life and
order need no memory and no lease. Of two brokers that renew at once the last writer stays; either's credentials work.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event
from broker.domain.errors import BlobError
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt, AttemptState, Job
from broker.ports import Change, Leased, StoreAccess
from broker.runtime.secret_box import SecretBox, SecretsError
from trainer.contract import object_keys as keys
from trainer.contract.documents import Grant, Sealed

log = logging.getLogger(__name__)

LIVE = frozenset({AttemptState.LAUNCHING, AttemptState.BOOTING, AttemptState.TRAINING, AttemptState.DRAINING})
"""A machine that is being destroyed is given nothing more."""
NEVER = datetime.max.replace(tzinfo=UTC)
TELL_AFTER = 3
"""Failures in a row after which people are told."""
URL_S = 7 * 86_400.0
"""The longest that clouds sign for. What it reads is sealed with the attempt's own key."""
RETRY_S = 60.0
"""Longest pause between two tries."""


@dataclass(frozen=True, kw_only=True)
class Granted:
    access: StoreAccess
    grant: Grant | None
    """What was written; None where there was nothing to seal."""
    url: str = field(default="", repr=False)
    """Reads `grant.json` without credentials; empty where they do not end, or the store has no signed URLs."""


@dataclass(frozen=True, kw_only=True)
class Granting:
    """Asks the blob store for credentials and writes `grant.json`."""

    context: ControllerContext
    box: SecretBox

    async def issue(
        self, job: Job, attempt: Attempt, secrets: Mapping[str, str], *, after: Grant | None = None
    ) -> Granted:
        """`after`: the grant that this one replaces. Raises BlobsUnavailable."""
        access = await self.context.blobs.grant(job.id, attempt.id, origin=job.spec.origin)
        if not secrets and access.expires_at is None:
            return Granted(access=access, grant=None)
        url = await self._url(attempt.id) if access.expires_at else ""
        options = dict(access.options) if access.expires_at else {}
        now_ms = int(self.context.clock.now().timestamp() * 1000)
        sealed = Sealed(store_options=options, secrets=dict(secrets), grant_url=url)
        grant = Grant(
            seq=now_ms if after is None else max(now_ms, after.seq + 1),
            expires_at=access.expires_at,
            sealed=self.box.seal_for(attempt.id, sealed),
        )
        await self.context.blobs.put(keys.grant(attempt.id), grant.model_dump_json().encode())
        return Granted(access=access, grant=grant, url=url)

    async def _url(self, attempt: AttemptId) -> str:
        try:
            return await self.context.blobs.sign(keys.grant(attempt), for_s=URL_S)
        except BlobError:
            return ""  # then credentials that end unseen are not renewed; everything else works


def renew_at(grant: Grant | None) -> datetime:
    """Half-way between issue and end; NEVER where nothing ends."""
    if grant is None or grant.expires_at is None:
        return NEVER
    issued = datetime.fromtimestamp(grant.seq / 1000, UTC)
    return issued + (grant.expires_at - issued) / 2


class Grants:
    """Renews without a lease, fenced by what `grant.json` says."""

    name = "grants"

    def __init__(self, context: ControllerContext, granting: Granting) -> None:
        self._context, self._granting = context, granting
        self._due: dict[AttemptId, datetime] = {}
        self._failures: dict[AttemptId, int] = {}
        self.every_s = context.rhythm.grants_s

    async def step(self) -> bool:
        context = self._context
        if context.blobs.local:
            return False
        live = [one for one in await context.store.live_attempts() if one.attempt.state in LIVE]
        ids = {one.attempt.id for one in live}
        self._due = {i: at for i, at in self._due.items() if i in ids}
        self._failures = {i: n for i, n in self._failures.items() if i in ids}
        now = context.clock.now()
        due = [one for one in live if one.attempt.id not in self._due or self._due[one.attempt.id] <= now]
        await decide_batch(context, self.name, due, self._look)
        return False

    async def _look(self, one: Leased) -> None:
        attempt = one.attempt
        try:
            at = await self._renewed(one)
        except (BlobError, SecretsError) as e:
            await self._failed(one, str(e))
            return
        self._failures.pop(attempt.id, None)
        self._due[attempt.id] = at

    async def _renewed(self, one: Leased) -> datetime:
        """When to look again. A grant is read first: another broker may have renewed it."""
        attempt, now = one.attempt, self._context.clock.now()
        data = await self._context.blobs.get(keys.grant(attempt.id))
        if data is None:
            # It is written before create is called, and only where something ends or is secret.
            return now if attempt.state is AttemptState.LAUNCHING else NEVER
        try:
            known = Grant.model_validate_json(data)
        except ValidationError as e:
            raise SecretsError(f"{keys.grant(attempt.id)} cannot be read: {e.errors()[0]['msg']}") from None
        if (at := renew_at(known)) > now:
            return at
        kept = self._granting.box.open_for(attempt.id, known.sealed)
        granted = await self._granting.issue(one.job, attempt, kept.secrets, after=known)
        return renew_at(granted.grant)

    async def _failed(self, one: Leased, why: str) -> None:
        """Tries again with growing pauses; people are told once. The agent trains on, and its checkpoints wait."""
        attempt, context = one.attempt, self._context
        failures = self._failures[attempt.id] = self._failures.get(attempt.id, 0) + 1
        pause_s = min(RETRY_S, self.every_s * 2.0 ** min(failures - 1, 10))
        self._due[attempt.id] = context.clock.now() + timedelta(seconds=pause_s)
        log.warning("grants: attempt %s of job %s: %s", attempt.id, one.job.id, why)
        if failures == TELL_AFTER:
            message = f"attempt {attempt.number}: its access to the blob store cannot be renewed: {why}"
            told = event(one.job, "attempt.grant_failing", message, attempt=attempt)
            await context.store.apply([Change(events=(told,))])
