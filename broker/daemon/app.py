"""The daemon: the only place where the rooms of the house are wired together."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from aiohttp import web

from broker.api.app import build_app
from broker.api.core.auth import Authenticator, hashed, mint
from broker.api.core.stream_limits import StreamLimits
from broker.api.core.upload_spool import sweep, sweep_halves
from broker.api.service.interfaces import DaemonHooks, Settings, nowhere
from broker.api.service.jobs import Service
from broker.api.service.quotes import QuoteService
from broker.blobs import GrantSettings, ObstoreBlobs
from broker.blobs.connect import folder_of, options_of, storage_usd_per_gib_month
from broker.controllers.base.context import ControllerContext, CostSettings, Intervals
from broker.controllers.fleet import Fleet
from broker.controllers.market.poller import MarketIntervals, MarketPoller
from broker.controllers.notifications.outbox import OutboxRetention
from broker.daemon.config import DaemonConfig
from broker.daemon.home_dir import SPOOL, check_blobs, holding, make_home, with_room
from broker.daemon.installation import installation_of, mark_new, only_report, refuse_other_blobs
from broker.daemon.listeners import Addresses, listening
from broker.daemon.preflight_adapter import Checks, forbidden
from broker.daemon.slack_wiring import SlackIntegration
from broker.daemon.trainer_bundle import TrainerSource, image_of
from broker.domain.errors import GpubrokerError, SchemaNewer
from broker.domain.ids import Installation
from broker.domain.job import Handle
from broker.domain.spec import Retention
from broker.estimator.planning.corrections import LearnedCorrections
from broker.notify.log import LogNotifier
from broker.notify.slack.socket_mode import SlackSockets
from broker.notify.webhook.notifier import WebhookNotifier
from broker.paths import CLIENT_FILE, CONFIG_FILE
from broker.ports import Notifier, Provider, Store, Token
from broker.preflight.model_lookup import HubClient
from broker.reporting.digest import DigestPlan
from broker.runtime.clock import DatabaseClock, SystemClock
from broker.runtime.control_loop import run_forever
from broker.runtime.peers import refuse_conflicting_brokers, seat_of
from broker.runtime.private_files import write_private
from broker.runtime.provider_gate import gated
from broker.runtime.secret_box import MASTER_KEY_FILE, SecretBox, sealing
from broker.runtime.token_bucket import TokenBucketRate
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from providers.registry import build
from trainer.contract.documents import Limits

log = logging.getLogger("gpubroker")

LOCAL_OWNER = "local"
"""Whose token client.json holds: the operator of this machine."""
CHECK_S = 30.0
FIRST_PRICES_S = 10.0
"""How long the first prices may keep the daemon from serving: a cloud that hangs must not."""


class ProviderMissing(GpubrokerError):
    """The configuration lost a provider that still has a live attempt."""


@dataclass(frozen=True, kw_only=True)
class DaemonComponents:
    """What the daemon has built, before it serves."""

    config: DaemonConfig
    installation: Installation
    store: Store
    market: MarketPoller
    fleet: Fleet
    clock: DatabaseClock
    application: web.Application
    sockets: SlackSockets


async def run(config: DaemonConfig, *, ready: Callable[[Addresses], None] = lambda at: None) -> None:
    """Serves until SIGTERM or SIGINT; `ready` is told where. Raises GpubrokerError when it cannot start, SchemaNewer
    also when a newer broker migrates the database meanwhile.

    A kill -9 at any moment is as good: machines go on, and the next start finds everything in the store.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        with with_room(config.home):
            house = await stack.enter_async_context(building(config))
            at = await stack.enter_async_context(listening(config, house.application))
            await write_client_file(house, at)
        work = asyncio.create_task(_work(house))
        stack.push_async_callback(_cancel, work)
        calm_garbage_collector()
        ready(at)
        stopped = asyncio.create_task(stop.wait())
        stack.push_async_callback(_cancel, stopped)
        await asyncio.wait((stopped, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            _outcome(work)
        log.info("stopping; machines go on, `gpubroker serve` picks them up again")


def calm_garbage_collector() -> None:
    """What was built by now lives as long as the process: going through it again and again costs pauses of 10-30 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _work(house: DaemonComponents) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(run_forever(house.clock, house.clock), name=house.clock.name)
        group.create_task(run_forever(house.market, house.fleet.context.clock), name=house.market.name)
        group.create_task(house.fleet.run(), name="fleet")
        group.create_task(run_forever(house.sockets, house.fleet.context.clock), name=house.sockets.name)


def _outcome(work: asyncio.Task[None]) -> None:
    """Raises what ended the work: SchemaNewer, or a fault of ours."""
    try:
        work.result()
    except BaseExceptionGroup as group:
        ended: BaseException | None = group.subgroup(SchemaNewer)
        while isinstance(ended, BaseExceptionGroup):
            ended = ended.exceptions[0]
        if ended is None:
            raise
        log.error("%s; stopping, the machines go on", ended)
        raise ended from None


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# ----------------------------------------------------------------------------------------------------------- the rooms


@asynccontextmanager
async def building(config: DaemonConfig) -> AsyncIterator[DaemonComponents]:
    """Everything but the listening socket and the running controllers; closed in reverse order."""
    make_home(config.home)
    check_blobs(folder_of(config.blobs_url), config.home)
    image = image_of(config.trainer, os.environ)
    async with AsyncExitStack() as stack:
        stack.enter_context(holding(config.home))
        sweep(config.home / SPOOL)
        context, clock, report_only = await _context(stack, config)
        if (folder := folder_of(config.blobs_url)) is not None:
            sweep_halves(folder / context.installation / "uploads")
        box = await sealing(context.store, config.home / MASTER_KEY_FILE, os.environ)
        market = await _market(context, config)
        slacks = SlackIntegration(box, context.clock, api_url=config.slack.api_url)
        agent, insecure = f"gpubroker/{version('gpubroker')}", config.notify.insecure_hosts
        webhooks = WebhookNotifier(box, context.clock, user_agent=agent, insecure_hosts=insecure)
        stack.push_async_callback(webhooks.close)
        notifiers: list[Notifier] = [LogNotifier(), slacks.notifier, webhooks]
        fleet = Fleet.build(
            context, box, market.offers, notifiers, trainer=TrainerSource(context.blobs, image),
            report_only=report_only, troubles=market.troubles, keep=keep_of(config),
            digest=DigestPlan(**config.notify.digest.model_dump()),
        )  # fmt: skip
        service = _service(config, context, market, box, notifiers, skew=lambda: clock.skew_s, learned=fleet.learned)
        incoming, sockets = await stack.enter_async_context(slacks.serving(service))
        authenticator = Authenticator(context.store, context.clock, TokenBucketRate(**config.rate_limit.model_dump()))
        limits = StreamLimits(**config.streams.model_dump())
        yield DaemonComponents(
            config=config,
            installation=context.installation,
            store=context.store,
            market=market,
            fleet=fleet,
            clock=clock,
            application=build_app(service, authenticator, version=version("gpubroker"), slacks=incoming, limits=limits),
            sockets=sockets,
        )


async def _context(stack: AsyncExitStack, config: DaemonConfig) -> tuple[ControllerContext, DatabaseClock, bool]:
    """What the controllers are given, its clock, and whether the sweep only reports."""
    dsn = config.database_url or await _embedded(stack, config.home)
    await migrate(dsn, before=partial(mark_new, config.home))
    store = await PostgresStore.connect(dsn)
    stack.push_async_callback(store.close)
    clock = DatabaseClock(store, SystemClock())
    await clock.start()
    installation = await installation_of(store, config.home)
    report_only = only_report(config.home)
    grants = replace(grants_of(config), now=clock.now)
    blobs = ObstoreBlobs.open(config.blobs_url, installation, options=config.blob_options, grants=grants)
    await refuse_other_blobs(store, blobs)
    providers = build(
        config.providers, installation=installation, state=config.home / "providers", clock=clock, blobs=blobs,
        launches=True,
    )  # fmt: skip
    providers = gated(providers, config.providers.rented(), clock)
    for provider in providers.values():
        stack.push_async_callback(provider.close)
    seat = seat_of(config.home, providers, await store.database())
    await refuse_conflicting_brokers(blobs, clock, seat)
    await _refuse_lost_providers(store, set(providers))
    context = ControllerContext(
        installation=installation,
        owner=f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(3)}",
        store=store,
        blobs=blobs,
        providers=providers,
        clock=clock,
        rhythm=rhythm_of(config),
        seat=seat,
        limits=Limits(**config.limits.model_dump()),
        costs=costs_of(config),
        forbidden=partial(forbidden, config.trainer.remote_code),
    )
    return context, clock, report_only


async def _market(context: ControllerContext, config: DaemonConfig) -> MarketPoller:
    """With its first prices, where they come soon."""
    market = MarketPoller(context.providers, context.clock, MarketIntervals(poll_s=config.rhythm.market_s))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_PRICES_S):
            await market.step()
    return market


async def _embedded(stack: AsyncExitStack, home: Path) -> str:
    server = await stack.enter_async_context(await EmbeddedPostgres.start(home / "postgres"))
    return server.dsn


async def _refuse_lost_providers(store: Store, configured: set[str]) -> None:
    """Nobody could watch or destroy a machine of a provider that is not configured. Raises ProviderMissing."""
    for one in await store.live_attempts():
        provider = one.attempt.line.offer.provider
        if provider not in configured:
            raise ProviderMissing(
                f"attempt {one.attempt.id} of job {one.job.id} still runs at {provider!r}, which providers in "
                f"{CONFIG_FILE} no longer names; put it back until that job has ended"
            )


def grants_of(config: DaemonConfig) -> GrantSettings:
    """How credentials for attempts are made."""
    return GrantSettings(**config.grants.model_dump())


def costs_of(config: DaemonConfig) -> CostSettings:
    """What the operator says of money and of keeping data."""
    kept, price = config.retention.model_dump(), config.storage_usd_per_gib_month
    if price is None:
        price = storage_usd_per_gib_month(config.blobs_url, options_of(config.blobs_url, config.blob_options))
    return CostSettings(
        price_rise=config.guard.price_rise_percent / 100,
        storage_usd_per_gib_month=price,
        uploads_days=kept.pop("uploads_days"),
        retention=Retention(**kept),
    )


def rhythm_of(config: DaemonConfig) -> Intervals:
    """Where SkyPilot launches, no more is asked of it than it does at once: what waits for its turn is not yet sent, so
    it costs nothing, and its price is looked at again.
    """
    rhythm = Intervals(**config.rhythm.model_dump())
    if not config.providers.rented():
        return rhythm
    return replace(rhythm, creates=min(rhythm.creates, config.providers.sky.launches))


def keep_of(config: DaemonConfig) -> OutboxRetention:
    """How long the outbox waits for a channel."""
    return OutboxRetention(age_s=config.notify.keep_days * 86_400, rows=config.notify.keep_deliveries)


def _service(
    config: DaemonConfig, context: ControllerContext, market: MarketPoller, box: SecretBox,
    notifiers: Sequence[Notifier], *, skew: Callable[[], float], learned: LearnedCorrections,
) -> Service:  # fmt: skip
    settings = Settings(
        spool=config.home / SPOOL,
        blobs=folder_of(config.blobs_url),
        upload_bytes=config.upload_max_bytes,
        lease_stale_s=max(90.0, 4 * config.rhythm.deadman_s),
        storage_usd_per_gib_month=context.costs.storage_usd_per_gib_month,
        drain_budget=context.tempo,
    )
    preflight = Checks(HubClient.of_environment(os.environ), context.clock, config.trainer.remote_code)
    return Service(
        store=context.store,
        blobs=context.blobs,
        quotes=QuoteService(
            context.store, context.blobs, market, preflight, context.clock, settings,
            entropy=os.urandom, learned=learned,
        ),
        box=box,
        clock=context.clock,
        entropy=os.urandom,
        notifiers=notifiers,
        settings=settings,
        hooks=DaemonHooks(
            reach=partial(_reach, context.providers),
            check_providers=partial(_check_providers, context.providers),
            skew=skew,
        ),
    )  # fmt: skip


async def _reach(providers: Mapping[str, Provider], handle: Handle, command: Sequence[str], tty: bool) -> Sequence[str]:
    """A machine may be in a cloud that was taken out of the configuration meanwhile."""
    if (provider := providers.get(handle.provider)) is None:
        return await nowhere(handle, command, tty)
    return await provider.reach(handle, command, tty=tty)


async def _check_providers(providers: Mapping[str, Provider]) -> dict[str, str | None]:
    async def ask(provider: Provider) -> str | None:
        try:
            async with asyncio.timeout(CHECK_S):
                return await provider.check()
        except TimeoutError:
            return f"no answer within {CHECK_S:.0f} s; check the network"
        except Exception as e:  # a cloud whose code breaks must not hide the others
            log.exception("checking %s failed", provider.name)
            return f"{type(e).__name__} while it was checked; see the daemon's log"

    return dict(zip(providers, await asyncio.gather(*map(ask, providers.values())), strict=True))


# --------------------------------------------------------------------------------------------------------- the network


async def write_client_file(house: DaemonComponents, at: Addresses) -> None:
    """How this user's CLI finds the daemon; a token that still works is kept, so that clients survive a restart."""
    file = house.config.home / CLIENT_FILE
    text = await _known_token(house.store, file) or await _new_token(house)
    told = {"url": at.url, "grpc": at.grpc, "certificate": at.certificate, "token": text}
    write_private(file, json.dumps(told).encode())


async def _known_token(store: Store, file: Path) -> str | None:
    try:
        text = json.loads(file.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) and await store.token(hashed(text)) else None


async def _new_token(house: DaemonComponents) -> str:
    token_id, text = mint(os.urandom)
    token = Token(
        id=token_id,
        owner=LOCAL_OWNER,
        scopes=("read", "submit", "manage", "admin"),
        created_at=house.fleet.context.clock.now(),
        note=f"the operator of {socket.gethostname()}",
    )
    await house.store.put_token(token, hashed(text))
    return text
