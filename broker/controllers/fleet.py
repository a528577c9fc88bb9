"""All controllers of one broker process, wired together."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from broker.controllers.beats import Beats
from broker.controllers.billing import Billing
from broker.controllers.boot import Boot, TrainerOf
from broker.controllers.budgets import Budgets
from broker.controllers.context import Context
from broker.controllers.deadman import Deadman
from broker.controllers.destroys import Destroys
from broker.controllers.digest import Digest
from broker.controllers.grants import Granting, Grants
from broker.controllers.guard import Guard
from broker.controllers.interruption import Interruption
from broker.controllers.inventory import Inventory
from broker.controllers.launch import Launch
from broker.controllers.launchers import Launchers
from broker.controllers.lessons import Lessons
from broker.controllers.liveness import LivenessController
from broker.controllers.look import Looker
from broker.controllers.loop import Controller, run_forever
from broker.controllers.outbox import Keep, Outbox
from broker.controllers.placement import Placement, Troubles
from broker.controllers.retention import Retention
from broker.controllers.sweep import Sweep
from broker.controllers.termination import Termination
from broker.controllers.through import Through
from broker.decide.digest import DigestPlan
from broker.decide.experience import Learned
from broker.domain.offer import Offer
from broker.ports import Notifier
from broker.secrets import SecretBox


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
