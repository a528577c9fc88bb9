"""Calls `Provider.create` and `Provider.confirm`, and returns the outcome as a value.

Used by the launch controller. The decision on an outcome is `broker.lifecycle.decisions.launch_decision.after_create`.
"""

import asyncio
from dataclasses import dataclass

from broker.controllers.base.context import ControllerContext
from broker.controllers.provisioning.attempt_documents import boot_properties
from broker.controllers.provisioning.boot_spec import Boot, Unusable
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.domain.errors import BlobError, ImageRefused, NoCapacity, ProviderError, Rejected, Throttled
from broker.domain.instance import Observed
from broker.domain.job import Attempt, Job, Reason
from broker.domain.market.offer_history import MarketGroup, bucket_of
from broker.lifecycle.account_refusals import account_refusal, block_s, offer_block_s
from broker.lifecycle.decisions.launch_decision import (
    Adopted,
    Created,
    CreateNotSent,
    CreateOutcome,
    CreateRefused,
    CreateUnknown,
    JobUnusable,
    NotConfirmed,
    all_handles,
)
from broker.lifecycle.state_machine import AttemptEvent
from broker.ports import Leased, Provider


@dataclass(frozen=True, kw_only=True)
class CreateCalls:
    context: ControllerContext
    launchers: CreatesInFlight
    boot: Boot

    async def create(self, leased: Leased, *, is_first: bool) -> CreateOutcome:
        """Return the outcome of a create. `is_first`: no create of this name was ever sent."""
        attempt, provider, boot = leased.attempt, self.context.provider_of(leased.attempt), None
        try:
            boot = await self.boot.prepare(leased)
            async with asyncio.timeout(provider.caps.boot_deadline_s):
                handles = await provider.create(attempt.name, attempt.line.offer, boot)
        except TimeoutError:
            await self.launchers.ask(attempt)
            return CreateUnknown(message=f"no answer within {provider.caps.boot_deadline_s:g} s")
        except Exception as error:
            return _failed(error, attempt, provider, is_prepared=boot is not None, is_first=is_first)
        return Created(handles=tuple(handles))

    async def confirm(self, attempt: Attempt, job: Job, listed: tuple[Observed, ...]) -> CreateOutcome:
        """Check that the listed machines are as bought, because the answer to their create was lost."""
        provider, handles = self.context.provider_of(attempt), all_handles(attempt, listed)
        try:
            await provider.confirm(handles, attempt.line.offer, boot_properties(job))
        except Rejected as e:
            return CreateRefused(event=AttemptEvent.REJECTED, message=str(e), handles=handles)
        except ProviderError as e:
            return NotConfirmed(handles=handles, message=str(e))
        return Adopted(handles=tuple(machine.handle for machine in listed))

    async def block(self, attempt: Attempt, refusal: CreateRefused) -> None:
        """Exclude the refused offer, or all offers of the refused account, from purchases for a while.

        A lack of capacity becomes part of the offer history.
        """
        store, account, offer_id = self.context.store, refusal.account, attempt.line.offer.id
        earlier = await store.attempts(attempt.job_id)
        if account is None:
            for_s = offer_block_s(offer_id, earlier, self.context.intervals.sold_out_s)
            await store.block_offer(offer_id, refusal.message, for_s=for_s)
        else:
            await store.block_offer(account.key, account.message, for_s=block_s(account, earlier))
        if refusal.is_sold_out:
            await store.record_refusal(MarketGroup.of(attempt.line.offer), bucket_of(self.context.clock.now()))


def _failed(
    error: Exception, attempt: Attempt, provider: Provider, *, is_prepared: bool, is_first: bool
) -> CreateOutcome:
    """Return the outcome of a create that raised `error`. `is_prepared`: the provider may have been called."""
    message = str(error)
    match error:
        case NoCapacity() | Throttled():
            is_sold_out = isinstance(error, NoCapacity)
            return CreateRefused(event=AttemptEvent.NO_CAPACITY, message=message, is_sold_out=is_sold_out)
        case ImageRefused():
            return CreateRefused(event=AttemptEvent.REJECTED, message=message, reason=Reason.IMAGE)
        case Rejected():
            account = account_refusal(attempt.line.offer, message) if is_prepared else None
            return CreateRefused(event=AttemptEvent.REJECTED, message=message, account=account)
        case Unusable():
            return JobUnusable(message=message)
        case BlobError():
            return CreateNotSent(message=message, is_first=is_first and not is_prepared)
        case ProviderError():
            return CreateUnknown(message=message)
    # The message of an unexpected exception may hold secrets, so only the log gets it, with the traceback.
    return CreateUnknown(message=f"{type(error).__name__} at {provider.name}; see the daemon's log", error=error)
