"""All controllers of one broker process, wired together."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from broker.controllers.base.context import ControllerContext
from broker.controllers.billing.budgets import Budgets
from broker.controllers.billing.metering import Billing
from broker.controllers.billing.retention import RetentionController
from broker.controllers.market.observed_runs import ObservedRuns
from broker.controllers.market.offer_history import ListedMarket, OfferHistory
from broker.controllers.monitoring.attempt_review import AttemptReview
from broker.controllers.monitoring.dead_man_switch import Deadman
from broker.controllers.monitoring.interruption import Interruption
from broker.controllers.monitoring.liveness import LivenessController
from broker.controllers.monitoring.spend_guard import Guard
from broker.controllers.notifications.digest import Digest
from broker.controllers.notifications.outbox import Outbox, OutboxRetention
from broker.controllers.observation.attempt_observer import AttemptObserver
from broker.controllers.observation.heartbeats import HeartbeatReader
from broker.controllers.observation.inventory import Inventory
from broker.controllers.provisioning.boot_spec import Boot, TrainerOf
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.provisioning.launch import Launch
from broker.controllers.provisioning.launcher_completion import LauncherCompletion
from broker.controllers.provisioning.placement import Placement, Troubles
from broker.controllers.provisioning.store_grants import Granting, Grants
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.orphan_sweep import Sweep
from broker.controllers.termination.termination import Termination
from broker.domain.instance import OrphanMachine
from broker.domain.offer import Offer
from broker.estimator.planning.corrections import LearnedCorrections
from broker.ports import Notifier
from broker.reporting.digest import DigestPlan
from broker.runtime.control_loop import Controller, run_forever
from broker.runtime.secret_box import SecretBox


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The controllers, roughly in the order in which they handle a job."""

    context: ControllerContext
    controllers: tuple[Controller, ...]
    launch: Launch
    destroys: Destroys
    outbox: Outbox
    learned: LearnedCorrections

    def orphans(self) -> Sequence[OrphanMachine]:
        """Return the orphans of each cloud's latest listing by this broker."""
        return [orphan for c in self.controllers if isinstance(c, Sweep) for orphan in c.orphans()]

    @classmethod
    def build(
        cls,
        context: ControllerContext,
        box: SecretBox,
        offers: Callable[[], Sequence[Offer]],
        notifiers: Sequence[Notifier],
        *,
        trainer: TrainerOf | None = None,
        report_only: bool = False,
        troubles: Troubles = dict,
        keep: OutboxRetention | None = None,
        digest: DigestPlan | None = None,
        market: ListedMarket | None = None,
    ) -> "Fleet":
        context = replace(context, timeouts=replace(context.timeouts, beat_s=context.limits.heartbeat_s))
        inventory, launchers, destroys = Inventory(context), CreatesInFlight(context), Destroys(context)
        beats, observed_runs = HeartbeatReader(context), ObservedRuns(context, offers)
        outbox = Outbox(context, notifiers, jitter=random.random, keep=keep)
        boot = Boot(context=context, box=box, trainer=trainer, learned=observed_runs)
        launch = Launch(context, inventory, launchers, boot, beats, offers)
        return cls(
            context=context,
            launch=launch,
            destroys=destroys,
            outbox=outbox,
            learned=observed_runs,
            controllers=(
                Placement(context, inventory, offers, troubles, observed_runs),
                launch,
                *_of_machines(context, inventory, launchers, destroys, beats),
                *_of_spending(context, inventory, offers, observed_runs),
                observed_runs,
                Sweep(context, inventory, destroys, report_only=report_only),
                Deadman(context),
                Grants(context, Granting(context=context, box=box)),
                outbox,
                *([Digest(context, digest)] if digest is not None else ()),
                *([OfferHistory(context, market)] if market is not None else ()),
            ),
        )

    async def run(self) -> None:
        """Run all controllers until cancelled. Creates in flight are cancelled too; the next process looks them up."""
        try:
            async with asyncio.TaskGroup() as group:
                for controller in self.controllers:
                    group.create_task(run_forever(controller, self.context.clock), name=controller.name)
        finally:
            await self.launch.close()
            await self.destroys.close()
            await self.outbox.close()


def _of_machines(
    context: ControllerContext,
    inventory: Inventory,
    launchers: CreatesInFlight,
    destroys: Destroys,
    beats: HeartbeatReader,
) -> tuple[Controller, ...]:
    """Return the controllers of bought machines."""
    observer = AttemptObserver(context, inventory, beats)
    interruption = Interruption(context, observer)
    return (
        LivenessController(context, observer),
        interruption,
        Termination(context, inventory, launchers, destroys),
        LauncherCompletion(context, launchers),
        Billing(context, inventory, (observer, launchers, interruption, destroys, inventory)),
    )


def _of_spending(
    context: ControllerContext, inventory: Inventory, offers: Callable[[], Sequence[Offer]], learned: LearnedCorrections
) -> tuple[Controller, ...]:
    """Return the controllers that limit spending and delete old data."""
    review = AttemptReview(context, inventory, offers, learned)
    return Guard(context, learned), review, RetentionController(context), Budgets(context)
