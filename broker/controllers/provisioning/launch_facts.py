"""Gathers the facts about a launching attempt for `broker.lifecycle.decisions.launch_decision.advance_launch`."""

from collections.abc import Sequence
from dataclasses import replace

from broker.controllers.base.context import ControllerContext
from broker.controllers.observation.heartbeats import HeartbeatReader, read_final
from broker.controllers.observation.inventory import Inventory
from broker.controllers.observation.restored_attempts import RestoredAttempts
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.domain.errors import BlobsUnavailable, ProviderError
from broker.lifecycle.decisions.launch_decision import LaunchFacts
from broker.lifecycle.launch import LaunchObservation
from broker.lifecycle.signals import required_end
from broker.ports import Leased


class LaunchFactsReader:
    """Reads listings, heartbeats, launchers and the blob store."""

    def __init__(
        self,
        context: ControllerContext,
        inventory: Inventory,
        launchers: CreatesInFlight,
        beats: HeartbeatReader,
        restored: RestoredAttempts,
    ) -> None:
        self._context, self._inventory, self._launchers = context, inventory, launchers
        self._beats, self._restored = beats, restored

    async def read_heartbeats(self, launching: Sequence[Leased]) -> bool:
        """Return False if heartbeats have not been readable for `lost_s`.

        The state of agents that launchers start is then unknown. If all these clouds start their agents themselves, no
        heartbeat is needed: return True.
        """
        names = {row.attempt.line.offer.provider for row in launching}
        providers = [self._context.providers[name] for name in names if name in self._context.providers]
        if all(provider.caps.agent_start_s is None for provider in providers):
            return True
        try:
            await self._beats.refresh()
        except BlobsUnavailable:
            return False
        readable_s = self._beats.readable_s
        return readable_s is not None and readable_s >= self._context.timeouts.lost_s

    async def gather(self, leased: Leased, *, is_readable: bool) -> LaunchFacts:
        """Return the facts. If a signal ends the attempt, the cloud is not listed, because listings do not matter."""
        attempt, context = leased.attempt, self._context
        provider = context.provider_of(attempt)
        observation, is_listed, running_at = LaunchObservation(), True, None
        if required_end(attempt, leased.job) is None:
            try:
                await self._inventory.refresh(provider.name)
            except ProviderError:
                is_listed = False
            else:
                running_at = self._inventory.running_at(attempt)
                observation = await self._observe(leased, is_readable)
        return LaunchFacts(
            job=leased.job,
            attempt=attempt,
            caps=provider.caps,
            now=context.clock.now(),
            observation=observation,
            is_listed=is_listed,
            running_at=running_at,
            look_s=context.intervals.look_s,
        )

    async def _observe(self, leased: Leased, is_readable: bool) -> LaunchObservation:
        attempt, provider = leased.attempt, leased.attempt.line.offer.provider
        dead_since = await self._launchers.dead_since(attempt)
        has_heartbeats = self._beats.shown(attempt.id, attempt.line.nodes)
        absence = self._inventory.absence(provider, attempt.name, dead_since, nodes=attempt.line.nodes)
        observation = LaunchObservation(
            listed=self._inventory.listed(provider, attempt.name),
            missing_once=absence.missing_once,
            has_heartbeats=has_heartbeats and not self._launchers.is_in_flight(attempt.name),
            store_ok=is_readable,
            dead_s=None if dead_since is None else self._context.clock.monotonic() - dead_since,
        )
        if not absence.proven:
            return observation
        return await self._with_end(leased, replace(observation, absent=True))

    async def _with_end(self, leased: Leased, observation: LaunchObservation) -> LaunchObservation:
        """Add the final report, and whether a later attempt follows that a restored backup lacks."""
        try:
            final = await read_final(self._context, leased.attempt.id)
            is_superseded = await self._restored.was_superseded(leased.job, leased.attempt)
        except BlobsUnavailable:
            return replace(observation, is_report_unreadable=True)
        return replace(observation, final=final, is_superseded=is_superseded)
