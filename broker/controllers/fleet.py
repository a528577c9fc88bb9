"""All controllers of one broker process, wired together."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from broker.controllers.base.context import Context
from broker.controllers.billing.budgets import Budgets
from broker.controllers.billing.metering import Billing
from broker.controllers.billing.retention import Retention
from broker.controllers.market.observed_runs import Lessons
from broker.controllers.monitoring.dead_man_switch import Deadman
from broker.controllers.monitoring.interruption import Interruption
from broker.controllers.monitoring.liveness import LivenessController
from broker.controllers.monitoring.spend_guard import Guard
from broker.controllers.notifications.digest import Digest
from broker.controllers.notifications.outbox import Keep, Outbox
from broker.controllers.observation.attempt_observer import Looker
from broker.controllers.observation.heartbeats import Beats
from broker.controllers.observation.inventory import Inventory
from broker.controllers.provisioning.boot_spec import Boot, TrainerOf
from broker.controllers.provisioning.creates_in_flight import Launchers
from broker.controllers.provisioning.launch import Launch
from broker.controllers.provisioning.launcher_completion import Through
from broker.controllers.provisioning.placement import Placement, Troubles
from broker.controllers.provisioning.store_grants import Granting, Grants
from broker.controllers.termination.destroy_queue import Destroys
from broker.controllers.termination.orphan_sweep import Sweep
from broker.controllers.termination.termination import Termination
from broker.domain.offer import Offer
from broker.estimator.planning.corrections import Learned
from broker.ports import Notifier
from broker.reporting.digest import DigestPlan
from broker.runtime.control_loop import Controller, run_forever
from broker.runtime.secret_box import SecretBox


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The controllers, in the order in which a job meets them."""

    context: Context
    controllers: tuple[Controller, ...]
    launch: Launch
    destroys: Destroys
    outbox: Outbox
    learned: Learned

    @classmethod
    def build(
        cls,
        context: Context,
        box: SecretBox,
        offers: Callable[[], Sequence[Offer]],
        notifiers: Sequence[Notifier],
        *,
        trainer: TrainerOf | None = None,
        report_only: bool = False,
        troubles: Troubles = dict,
        keep: Keep | None = None,
        digest: DigestPlan | None = None,
    ) -> "Fleet":
        context = replace(context, patience=replace(context.patience, beat_s=context.limits.beat_s))
        inventory, launchers, destroys = Inventory(context), Launchers(context), Destroys(context)
        beats, lessons = Beats(context), Lessons(context)
        outbox = Outbox(context, notifiers, jitter=random.random, keep=keep)
        boot = Boot(context=context, box=box, trainer=trainer, learned=lessons)
        launch = Launch(context, inventory, launchers, boot, beats, offers)
        return cls(
            context=context,
            launch=launch,
            destroys=destroys,
            outbox=outbox,
            learned=lessons,
            controllers=(
                Placement(context, inventory, offers, troubles, lessons),
                launch,
                *_of_machines(context, inventory, launchers, destroys, beats),
                Guard(context, lessons),
                Retention(context),
                Budgets(context),
                lessons,
                Sweep(context, inventory, destroys, report_only=report_only),
                Deadman(context),
                Grants(context, Granting(context=context, box=box)),
                outbox,
                *([Digest(context, digest)] if digest is not None else ()),
            ),
        )

    async def run(self) -> None:
        """Until cancelled. Creates under way are cancelled with it: what they left is looked up by the next process."""
        try:
            async with asyncio.TaskGroup() as group:
                for controller in self.controllers:
                    group.create_task(run_forever(controller, self.context.clock), name=controller.name)
        finally:
            await self.launch.close()
            await self.destroys.close()
            await self.outbox.close()


def _of_machines(
    context: Context, inventory: Inventory, launchers: Launchers, destroys: Destroys, beats: Beats
) -> tuple[Controller, ...]:
    """Those of machines that were bought, until they are gone."""
    looker = Looker(context, inventory, beats)
    interruption = Interruption(context, looker)
    return (
        LivenessController(context, looker),
        interruption,
        Termination(context, inventory, launchers, destroys),
        Through(context, launchers),
        Billing(context, inventory, (looker, launchers, interruption, destroys, inventory)),
    )
