"""Planned attempts are created once, by name; what a lost reply left behind is looked up and adopted."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from broker.billing.accrual import no_machine_known
from broker.billing.prices import MachineSpan, extra_machine_changes
from broker.controllers.base.batch import decide_batch
from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.controllers.base.events import event, moved
from broker.controllers.billing.charges import priced, surplus, up_to
from broker.controllers.market.offers_by_id import Offers
from broker.controllers.observation.heartbeats import HeartbeatReader, read_final
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.controllers.provisioning.boot_spec import Boot, Unusable, bought_for
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.provisioning.intents import CREATE_LOOK_S, Intents
from broker.domain.errors import (
    BlobError,
    BlobsUnavailable,
    ImageRefused,
    NoCapacity,
    ProviderError,
    Rejected,
    Throttled,
)
from broker.domain.instance import Observed
from broker.domain.job import Attempt, AttemptState, Handle, Reason
from broker.domain.offer import Offer
from broker.lifecycle.account_refusals import AccountRefusal, block_s, of_account
from broker.lifecycle.launch import LaunchLook, judge_launching
from broker.lifecycle.liveness import fault, mismatch
from broker.lifecycle.signals import SIGNALS, signalled
from broker.lifecycle.state_machine import AttemptEvent, Effect
from broker.lifecycle.transitions import reason_of, setup_reason, step
from broker.ports import Change, Lane, Leased
from broker.runtime.background_tasks import Tasks
from trainer.contract.documents import Final


class Launch:
    """Claims attempts that are planned or launching."""

    name = "launch"

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        launchers: CreatesInFlight,
        boot: Boot,
        beats: HeartbeatReader,
        offers: Offers,
    ) -> None:
        self._context = context
        self._inventory = inventory
        self._launchers = launchers
        self._boot = boot
        self._beats = beats
        self._restored = RestoredAttempts(context, inventory)
        self._intents = Intents(context, self._restored, offers)
        self._claims = Claims(context, Lane.LAUNCH)
        self._creates = Tasks()
        self.every_s = context.rhythm.poll_s

    async def close(self) -> None:
        """Cancels the creates under way; their outcome is unknown and will be looked up."""
        await self._creates.cancel()

    async def step(self) -> bool:
        context = self._context
        self._restored.begin()
        free = context.rhythm.creates - self._launchers.in_flight
        full = free <= 0
        if full and await self._creates.one_done(self.every_s):
            return True
        # While a cloud takes its time, what is launching is still looked at: a stop and the cap do not wait.
        limit = context.rhythm.claim if full else min(free, context.rhythm.claim)
        async with self._claims.leased(limit=limit, turns=self._inventory.turns) as leased:
            return bool(leased) and await self._go_on(leased, full=full)

    async def _go_on(self, leased: Sequence[Leased], *, full: bool) -> bool:
        context = self._context
        planned = [one for one in leased if one.attempt.state is AttemptState.PLANNED]
        later = [one for one in planned if full and self._intents.never_sent(one) is None]
        if later:
            await context.store.release([], [one.attempt for one in later], due_in_s=self.every_s)
        if sent := [one for one in planned if one not in later]:
            await self._send(sent)
        launching = [one for one in leased if one.attempt.state is AttemptState.LAUNCHING]
        store_ok = await self._read_beats(launching)
        await decide_batch(context, self.name, launching, lambda one: self._look_up(one, store_ok))
        return True

    async def _look_up(self, one: Leased, store_ok: bool) -> None:
        with self._claims.writing():
            await self._look_at(one, store_ok)

    # ------------------------------------------------------------------------------------------------------ planned

    async def _send(self, leased: list[Leased]) -> None:
        """Commits `create_sent_at` first: from here on the name may exist, and is charged for."""
        intents = await decide_batch(self._context, self.name, leased, self._intents.change)
        for one, (_, sends) in intents:
            if sends:
                self._launchers.register(one.attempt)
        held: list[bool] = [False] * len(intents)
        try:
            held = list(await self._context.store.apply([change for _, (change, _) in intents]))
        finally:
            for (one, (_, sends)), ok in zip(intents, held, strict=True):
                if sends and not ok:
                    self._launchers.release(one.attempt.name)
        for (one, (change, sends)), ok in zip(intents, held, strict=True):
            if ok and change.attempt and sends:
                self._start(Leased(attempt=change.attempt[1], job=one.job), first=True)

    def _start(self, one: Leased, *, first: bool) -> None:
        self._launchers.attach(one.attempt.name, self._creates.start(self._create(one, first)))

    async def _create(self, one: Leased, first: bool) -> None:
        attempt = one.attempt
        provider, boot = self._context.provider_of(attempt), None
        try:
            boot = await self._boot.prepare(one)
            async with asyncio.timeout(provider.caps.boot_deadline_s):
                handles = await provider.create(attempt.name, attempt.line.offer, boot)
        except (NoCapacity, Throttled) as e:
            await self._refused(one, AttemptEvent.NO_CAPACITY, str(e))
        except ImageRefused as e:
            await self._refused(one, AttemptEvent.REJECTED, str(e), Reason.IMAGE)
        except Rejected as e:
            found = of_account(attempt.line.offer, str(e)) if boot else None
            await self._refused(one, AttemptEvent.REJECTED, str(e), account=found)
        except Unusable as e:
            await self._answer(one, partial(self._unusable, why=str(e)))
        except BlobError as e:
            await self._answer(one, partial(self._unsent, first=first and boot is None, why=str(e)))
        except ProviderError as e:
            await self._answer(one, partial(self._unknown, why=str(e)))
        except TimeoutError:
            await self._launchers.ask(attempt)
            why = f"no answer within {provider.caps.boot_deadline_s:g} s"
            await self._answer(one, partial(self._unknown, why=why))
        except Exception as e:
            # Its words may hold anything: they are for the log, which gets them with the place.
            why = f"{type(e).__name__} at {provider.name}; see the daemon's log"
            await self._answer(one, partial(self._unknown, why=why))
            raise
        else:
            await self._answer(one, partial(self._answered, handles=tuple(handles)))

    async def _answer(self, one: Leased, change: Callable[[Leased], Change]) -> None:
        """Writes what create said. It holds for as long as the attempt is launching, whoever leased it meanwhile to
        look it up: a look-up changes nothing while the launcher is not proven dead.
        """
        while not await self._write(change(one)):
            now = (await self._context.store.attempts_by_id([one.attempt.id])).get(one.attempt.id)
            if now is None or now.state is not AttemptState.LAUNCHING:
                return
            one = replace(one, attempt=now)

    async def _write(self, change: Change) -> bool:
        """What it makes a machine that stands is followed from now on: the database may be gone before billing asks."""
        (held,) = await self._context.store.apply([change])
        if held and change.attempt and change.attempt[1].state is AttemptState.BOOTING:
            booting = change.attempt[1]
            self._inventory.unseen_since(booting.line.offer.provider, booting.name, born_by=booting.booted_at)
        return held

    def _unknown(self, one: Leased, why: str) -> Change:
        detail = replace(one.attempt, detail=f"create's outcome is unknown: {why}")
        return Change(attempt=(one.attempt, detail), due_in_s=self.every_s)

    def _unsent(self, one: Leased, first: bool, why: str) -> Change:
        """No cloud was asked, since what the machine is to be given could not be written: any broker may create it, at
        no cost if it is the `first` create of that name, else once two listings show nothing.
        """
        unsent = replace(one.attempt, launched_by="", detail=f"create was not sent: {why}")
        own = one.attempt.launched_by == self._context.provider_of(unsent).launcher_id()
        if not (first and own and no_machine_known(unsent) and unsent.charged_to is None):
            return Change(attempt=(one.attempt, unsent), due_in_s=self.every_s)
        unsent = step(unsent, AttemptEvent.UNSENT, self._context.clock.now()).attempt
        return Change(attempt=(one.attempt, unsent), due_in_s=CREATE_LOOK_S)

    def _unusable(self, one: Leased, why: str) -> Change:
        """No cloud was asked, and the same would come of another offer: the job fails, and its offer stands."""
        now = self._context.clock.now()
        ended = step(one.attempt, AttemptEvent.REJECTED, now, reason=Reason.USER_ERROR).attempt
        told = event(one.job, "attempt.refused", why, attempt=ended)
        return Change(attempt=(one.attempt, replace(ended, detail=why)), events=(told,))

    async def _refused(
        self,
        one: Leased,
        why: AttemptEvent,
        message: str,
        reason: Reason | None = None,
        *,
        seen: tuple[Handle, ...] = (),
        account: AccountRefusal | None = None,
    ) -> None:
        """`seen`: what stands all the same, and is charged. `account`: what it says of more than this offer."""
        offer, store = one.attempt.line.offer, self._context.store
        words, detail = f"{offer.cloud}: {message}", message
        if account is None:
            await store.block_offer(offer.id, message, for_s=self._context.rhythm.sold_out_s)
        else:
            words = detail = f"{account.words} ({message})"
            passed_s = block_s(account, await store.attempts(one.attempt.job_id))
            await store.block_offer(account.key, account.words, for_s=passed_s)

        def refusal(now: Leased) -> Change:
            ended = step(now.attempt, why, self._context.clock.now(), reason=reason).attempt
            told = event(now.job, "attempt.refused", words, attempt=ended)
            noted = replace(ended, detail=detail, handles=seen or ended.handles)
            return Change(attempt=(now.attempt, noted), events=(told,))

        await self._answer(one, refusal)

    def _created(self, one: Leased, handles: tuple[Handle, ...]) -> Change:
        booting = step(one.attempt, AttemptEvent.CREATED, self._context.clock.now()).attempt
        told = event(one.job, "attempt.booting", f"attempt {booting.number} is starting", attempt=booting)
        return Change(attempt=(one.attempt, replace(booting, handles=handles, detail="")), events=(told,))

    def _answered(self, one: Leased, handles: tuple[Handle, ...]) -> Change:
        """Whoever carried it out is through with it, and so need not be proven dead once the attempt is over: another
        broker cannot prove that of a host that is lost.
        """
        complete = len(handles) == one.attempt.line.nodes
        change = self._created(one, handles) if complete else self._miscounted(one, handles)
        assert change.attempt is not None
        before, after = change.attempt
        return replace(change, attempt=(before, replace(after, launched_by="")))

    def _miscounted(self, one: Leased, handles: tuple[Handle, ...]) -> Change:
        """Some of several machines: never filled up by name, since a launcher may then wait for the others for ever.
        Or more than were bought, which would bill without being paid for here.
        """
        now = self._context.clock.now()
        ended = step(one.attempt, AttemptEvent.MISMATCH, now).attempt
        detail = f"asked for {one.attempt.line.nodes} machines, got {len(handles)}"
        ended = replace(ended, handles=handles, detail=detail)
        stood = [MachineSpan(id=handle.id, since=None, shown=now, until=None) for handle in handles]
        prices = extra_machine_changes(one.attempt, one.attempt.prices, stood)
        charge = priced(one.attempt, prices) if prices else None
        return Change(attempt=(one.attempt, ended), charge=charge, events=(moved(one.job, ended),))

    # ----------------------------------------------------------------------------------------------------- launching

    async def _read_beats(self, launching: Sequence[Leased]) -> bool:
        """False: the blob store cannot be read, or could not a moment ago, so nothing is known of agents that launchers
        start.
        """
        asked = {self._context.providers.get(one.attempt.line.offer.provider) for one in launching} - {None}
        if all(provider.caps.agent_start_s is None for provider in asked if provider is not None):
            return True
        try:
            await self._beats.refresh()
        except BlobsUnavailable:
            return False
        readable_s = self._beats.readable_s
        return readable_s is not None and readable_s >= self._context.patience.lost_s

    async def _look_at(self, one: Leased, store_ok: bool) -> None:
        """A create that has not answered: adopt what the cloud shows, or end what went wrong; create again only when
        that is proven safe.
        """
        attempt, context = one.attempt, self._context
        provider = context.provider_of(attempt)
        signal = signalled(one.attempt, one.job)
        if signal is not None:
            await self._break_off(one, signal, ())
            return
        try:
            await self._inventory.refresh(provider.name)
        except ProviderError:
            await context.store.release([], [attempt], due_in_s=CREATE_LOOK_S)
            return
        one = replace(one, attempt=replace(attempt, running_at=self._inventory.running_at(attempt)))
        look = await self._look(one, store_ok)
        told = judge_launching(attempt, look, provider.caps, context.clock.now())
        if told is None:
            await self._wait_on(one, look.seen, attempt)
        elif told is AttemptEvent.CREATED:
            await self._adopt(one, look.seen)
        elif told is AttemptEvent.ABSENT:
            await self._again(one)
        else:
            await self._break_off(one, told, look.seen, look.final)

    async def _adopt(self, one: Leased, seen: Sequence[Observed]) -> None:
        """Nobody has heard what create would have said of these machines, so that is asked for first."""
        provider, handles = self._context.provider_of(one.attempt), _handles(one.attempt, seen)
        try:
            await provider.confirm(handles, one.attempt.line.offer, bought_for(one.job))
        except Rejected as e:
            await self._refused(one, AttemptEvent.REJECTED, str(e), seen=handles)
        except ProviderError as e:
            noted = replace(one.attempt, handles=handles, detail=f"its agent runs, but it cannot be looked at: {e}")
            await self._context.store.apply([Change(attempt=(one.attempt, noted), due_in_s=CREATE_LOOK_S)])
        else:
            await self._write(self._created(one, tuple(o.handle for o in seen)))

    async def _look(self, one: Leased, store_ok: bool) -> LaunchLook:
        attempt, provider = one.attempt, one.attempt.line.offer.provider
        dead = await self._launchers.dead_since(attempt)
        look = LaunchLook(
            seen=self._inventory.seen(provider, attempt.name),
            omits=self._inventory.omits(provider, attempt.name, attempt.line.nodes),
            beating=self._beats.shown(attempt.id, attempt.line.nodes)
            and not self._launchers.is_in_flight(attempt.name),
            store_ok=store_ok,
            dead_s=None if dead is None else self._context.clock.monotonic() - dead,
        )
        absent = dead is not None and self._inventory.absent_since(provider, attempt.name, dead) is not None
        return await self._after_it(one, replace(look, absent=True)) if absent else look

    async def _after_it(self, one: Leased, look: LaunchLook) -> LaunchLook:
        """Once nothing stands: how it ended, and whether another attempt follows."""
        try:
            final = await read_final(self._context, one.attempt.id)
            return replace(look, final=final, followed=await self._restored.was_superseded(one.job, one.attempt))
        except BlobsUnavailable:
            return replace(look, unread=True)

    async def _wait_on(self, one: Leased, seen: Sequence[Observed], read: Attempt) -> None:
        """What stands there already is recorded: whoever ends this attempt destroys it, shown by then or not.

        `read`: the attempt as it was claimed.
        """
        due_s = min(CREATE_LOOK_S, self._context.rhythm.look_s)
        noted = replace(one.attempt, handles=_handles(one.attempt, seen))
        if noted == read:
            await self._context.store.release([], [read], due_in_s=due_s)
        else:
            await self._context.store.apply([Change(attempt=(read, noted), due_in_s=due_s)])

    async def _again(self, one: Leased) -> None:
        """The same name and the first `create_sent_at`: no second machine, and no second left uncharged. So the time of
        the first, whose outcome is unknown, is charged now: the next one may be refused.
        """
        attempt, now = one.attempt, self._context.clock.now()
        self._launchers.register(attempt)
        sent = step(attempt, AttemptEvent.ABSENT, now).attempt
        sent = replace(sent, launched_by=self._context.provider_of(attempt).launcher_id())
        change = Change(attempt=(attempt, sent), charge=up_to(attempt, now), due_in_s=CREATE_LOOK_S)
        try:
            (held,) = await self._context.store.apply([change])
        except BaseException:
            self._launchers.release(attempt.name)
            raise
        if held:
            self._start(Leased(attempt=sent, job=one.job), first=False)
        else:
            self._launchers.release(attempt.name)

    async def _break_off(
        self, one: Leased, why: AttemptEvent, seen: Sequence[Observed], final: Final | None = None
    ) -> None:
        """Waits for the launch no longer: what stands there is destroyed, and its launcher is told to stop."""
        offer = one.attempt.line.offer
        reason = setup_reason(tuple(seen)) if why is AttemptEvent.SETUP_FAILED else None
        if final is not None:
            reason = reason_of(final, None)  # what it was drained for is asked for when it is settled
        decision = step(one.attempt, why, self._context.clock.now(), reason=reason)
        # What create said before it was given up on tells people more than that it was.
        cause = f"{why.value} ({one.attempt.detail})" if one.attempt.detail else why.value
        detail = final.message if final else _shown(offer, why, tuple(seen)) or cause
        ended = replace(decision.attempt, final=final, detail=detail, handles=_handles(one.attempt, seen))
        told = () if why in _SIGNALS else (moved(one.job, ended),)
        charge = surplus(self._context, self._inventory, one.attempt)
        (held,) = await self._context.store.apply([Change(attempt=(one.attempt, ended), charge=charge, events=told)])
        if not held:  # billing charged it meanwhile, or it is another broker's
            await self._context.store.release([], [one.attempt], due_in_s=0.0)
        elif Effect.CANCEL in decision.effects:
            await self._launchers.stop(one.attempt)


_SIGNALS = frozenset({AttemptEvent.STOP, *(meaning.event for meaning in SIGNALS.values())})


def _shown(offer: Offer, why: AttemptEvent, seen: tuple[Observed, ...]) -> str | None:
    """What the machines themselves show of the reason."""
    if why is AttemptEvent.MISMATCH:
        return mismatch(offer, seen)
    return fault(seen) if why is AttemptEvent.SETUP_FAILED else None


def _handles(attempt: Attempt, seen: Sequence[Observed]) -> tuple[Handle, ...]:
    """The recorded machines and those that are shown."""
    return tuple({h.id: h for h in (*attempt.handles, *(o.handle for o in seen))}.values())
