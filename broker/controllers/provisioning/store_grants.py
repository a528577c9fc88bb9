"""Grants: credentials of the blob store, issued to an attempt at launch and renewed at half of their life.

Steps: read live attempts; for each that is due, gather `GrantFacts`, call `decide_grant`, and issue the next grant if
the decision says so. After a failure call `after_failure` and write its event.
Facts: the grant in the blob store, the clock, failures in a row.
Decisions: `GrantDecision`, `FailureDecision`.

If two brokers renew at once, the last write wins, and the credentials of both work.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import ValidationError

from broker.controllers.base.batch import decide_batch
from broker.controllers.base.context import ControllerContext
from broker.domain.errors import BlobError
from broker.domain.ids import AttemptId
from broker.domain.job import Attempt, Job
from broker.lifecycle.decisions.grant_decision import (
    RENEWED_STATES,
    GrantFacts,
    after_failure,
    decide_grant,
    renew_at,
)
from broker.ports import Change, Leased, StoreAccess
from broker.runtime.secret_box import SecretBox, SecretsError
from trainer.contract import object_keys
from trainer.contract.documents import Grant, Sealed

log = logging.getLogger(__name__)

URL_S = 7 * 86_400.0
"""Longest validity of a signed URL that clouds allow, in seconds. The content is sealed with the attempt's key."""


@dataclass(frozen=True, kw_only=True)
class Granted:
    access: StoreAccess
    grant: Grant | None
    """The grant that was written; None: there was nothing to seal."""
    url: str = field(default="", repr=False)
    """Signed URL that reads `grant.json`; empty: no credentials expire, or the blob store cannot sign URLs."""


@dataclass(frozen=True, kw_only=True)
class Granting:
    """Issues credentials of the blob store and writes `grant.json`."""

    context: ControllerContext
    box: SecretBox

    async def issue(
        self, job: Job, attempt: Attempt, secrets: Mapping[str, str], *, after: Grant | None = None
    ) -> Granted:
        """Issue a grant. `after`: the grant that it replaces. Raises BlobsUnavailable."""
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
        await self.context.blobs.put(object_keys.grant(attempt.id), grant.model_dump_json().encode())
        return Granted(access=access, grant=grant, url=url)

    async def _url(self, attempt: AttemptId) -> str:
        try:
            return await self.context.blobs.sign(object_keys.grant(attempt), for_s=URL_S)
        except BlobError:
            return ""  # without a URL an agent cannot renew expired credentials; the rest works


class Grants:
    """Renews grants without a lease; `grant.json` is the fence."""

    name = "grants"

    def __init__(self, context: ControllerContext, granting: Granting) -> None:
        self._context, self._granting = context, granting
        self._due: dict[AttemptId, datetime] = {}
        self._failures: dict[AttemptId, int] = {}
        self.every_s = context.intervals.grants_s

    async def step(self) -> bool:
        context = self._context
        if context.blobs.local:
            return False
        live = [row for row in await context.store.sent_attempts() if row.attempt.state in RENEWED_STATES]
        ids = {row.attempt.id for row in live}
        self._due = {i: at for i, at in self._due.items() if i in ids}
        self._failures = {i: n for i, n in self._failures.items() if i in ids}
        now = context.clock.now()
        due_rows = [row for row in live if row.attempt.id not in self._due or self._due[row.attempt.id] <= now]
        await decide_batch(context, self.name, due_rows, self._renew_if_due)
        return False

    async def _renew_if_due(self, leased: Leased) -> None:
        attempt = leased.attempt
        try:
            at = await self._renewed(leased)
        except (BlobError, SecretsError) as e:
            await self._failed(leased, str(e))
            return
        self._failures.pop(attempt.id, None)
        self._due[attempt.id] = at

    async def _renewed(self, leased: Leased) -> datetime:
        """Renew a grant that is due, and return the time of the next check.

        The grant is read first, since another broker may have renewed it.
        """
        decision = decide_grant(await self._gather(leased.attempt))
        if decision.renews is None:
            return decision.check_at
        opened = self._granting.box.open_for(leased.attempt.id, decision.renews.sealed)
        granted = await self._granting.issue(leased.job, leased.attempt, opened.secrets, after=decision.renews)
        return renew_at(granted.grant)

    async def _gather(self, attempt: Attempt) -> GrantFacts:
        now, key = self._context.clock.now(), object_keys.grant(attempt.id)
        data = await self._context.blobs.get(key)
        try:
            grant = None if data is None else Grant.model_validate_json(data)
        except ValidationError as e:
            raise SecretsError(f"{key} cannot be read: {e.errors()[0]['msg']}") from None
        return GrantFacts(attempt=attempt, grant=grant, now=now)

    async def _failed(self, leased: Leased, cause: str) -> None:
        """Schedule another attempt, and report once."""
        job, attempt, context = leased.job, leased.attempt, self._context
        failures = self._failures[attempt.id] = self._failures.get(attempt.id, 0) + 1
        decision = after_failure(job, attempt, cause, failures=failures, now=context.clock.now(), every_s=self.every_s)
        self._due[attempt.id] = decision.check_at
        log.warning("grants: attempt %s of job %s: %s", attempt.id, job.id, cause)
        if decision.event is not None:
            await context.store.apply([Change(events=(decision.event,))])
