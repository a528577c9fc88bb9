"""The daemon: builds store, blob store, providers, controllers and APIs from the configuration, and runs them."""

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
from broker.api.core.upload_spool import sweep, sweep_unfinished
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
from broker.daemon.host_admissions import HostAdmissions, host_rules, host_sandbox, model_folders
from broker.daemon.installation import installation_of, mark_new, only_report, refuse_other_blobs
from broker.daemon.listeners import Addresses, allow_files, listening
from broker.daemon.preflight_adapter import Checks, forbidden
from broker.daemon.slack_wiring import SlackIntegration
from broker.daemon.trainer_bundle import TrainerSource, image_of
from broker.domain.errors import GpubrokerError, SchemaNewer
from broker.domain.ids import Installation
from broker.domain.job import Handle
from broker.domain.offer import CredentialCheck
from broker.domain.spec import Retention
from broker.notify.log import LogNotifier
from broker.notify.slack.socket_mode import SlackSockets
from broker.notify.webhook.notifier import WebhookNotifier
from broker.paths import CLIENT_FILE, CONFIG_FILE
from broker.ports import Notifier, Provider, Store, Token
from broker.preflight.model_lookup import HubClient
from broker.reporting.digest import DigestPlan
from broker.runtime.boot_clock import CLOCK_FILE, AnchorFile, boot_seconds
from broker.runtime.clock import DatabaseClock, SystemClock
from broker.runtime.control_loop import run_forever
from broker.runtime.peers import refuse_conflicting_brokers, seat_of
from broker.runtime.private_files import write_private
from broker.runtime.provider_gate import gated
from broker.runtime.secret_box import MASTER_KEY_FILE, SecretBox, sealing
from broker.runtime.spot_planner import SpotPlanner
from broker.runtime.token_bucket import TokenBucketRate
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from broker.web.app import mount
from providers.registry import build, check_skypilot
from trainer.contract.documents import Limits

log = logging.getLogger("gpubroker")

LOCAL_OWNER = "local"
"""Owner of the token in client.json: the operator of this host."""
CHECK_S = 30.0
FIRST_PRICES_S = 10.0
"""Seconds for which the daemon waits for its first prices before it serves, because a cloud may hang."""


class ProviderMissing(GpubrokerError):
    """Raised if the configuration lacks a provider that still has a live attempt."""


@dataclass(frozen=True, kw_only=True)
class DaemonComponents:
    """Parts of the daemon that exist before it serves."""

    config: DaemonConfig
    installation: Installation
    store: Store
    market: MarketPoller
    fleet: Fleet
    clock: DatabaseClock
    application: web.Application
    sockets: SlackSockets


async def run(config: DaemonConfig, *, ready: Callable[[Addresses], None] = lambda at: None) -> None:
    """Serve until SIGTERM or SIGINT, and call `ready` with the addresses.

    Raises GpubrokerError if the daemon cannot start, and SchemaNewer also if a newer broker migrates the database while
    this one runs. A kill -9 at any moment is safe: machines keep training, and the next start reads the store.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        with with_room(config.home):
            allow_files()
            components = await stack.enter_async_context(building(config))
            at = await stack.enter_async_context(listening(config, components.application))
            await write_client_file(components, at)
        work = asyncio.create_task(_work(components))
        stack.push_async_callback(_cancel, work)
        calm_garbage_collector()
        ready(at)
        stopped = asyncio.create_task(stop.wait())
        stack.push_async_callback(_cancel, stopped)
        await asyncio.wait((stopped, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            _outcome(work)
        log.info("stopping; running machines keep training, the next `gpubroker serve` reattaches to them")


def calm_garbage_collector() -> None:
    """Exclude existing objects from garbage collection, because a scan takes 10-30 ms and frees none of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _work(components: DaemonComponents) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(run_forever(components.clock, components.clock), name=components.clock.name)
        group.create_task(run_forever(components.market, components.fleet.context.clock), name=components.market.name)
        group.create_task(components.fleet.run(), name="fleet")
        group.create_task(run_forever(components.sockets, components.fleet.context.clock), name=components.sockets.name)


def _outcome(work: asyncio.Task[None]) -> None:
    """Raise the error that ended a controller: SchemaNewer, or a fault of the daemon."""
    try:
        work.result()
    except BaseExceptionGroup as group:
        ended: BaseException | None = group.subgroup(SchemaNewer)
        while isinstance(ended, BaseExceptionGroup):
            ended = ended.exceptions[0]
        if ended is None:
            raise
        log.error("%s; stopping, running machines keep training", ended)
        raise ended from None


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# ----------------------------------------------------------------------------------------------------------- the parts


@asynccontextmanager
async def building(config: DaemonConfig) -> AsyncIterator[DaemonComponents]:
    """Yield the components of a daemon that neither listens nor runs controllers. They are closed in reverse order."""
    make_home(config.home)
    check_blobs(folder_of(config.blobs_url), config.home)
    check_skypilot(config.providers, config.home / "providers")
    image = image_of(config.trainer, os.environ)
    async with AsyncExitStack() as stack:
        stack.enter_context(holding(config.home))
        sweep(config.home / SPOOL)
        context, clock, report_only = await _context(stack, config)
        if (folder := folder_of(config.blobs_url)) is not None:
            sweep_unfinished(folder / context.installation / "uploads")
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
            digest=DigestPlan(**config.notify.digest.model_dump()), market=market,
        )  # fmt: skip
        service = _service(config, context, market, box, notifiers, clock=clock, fleet=fleet)
        incoming, sockets = await stack.enter_async_context(slacks.serving(service))
        authenticator = Authenticator(context.store, context.clock, TokenBucketRate(**config.rate_limit.model_dump()))
        limits = StreamLimits(**config.streams.model_dump())
        application = build_app(service, authenticator, version=version("gpubroker"), slacks=incoming, limits=limits)
        mount(application, config.oidc)
        yield DaemonComponents(
            config=config,
            installation=context.installation,
            store=context.store,
            market=market,
            fleet=fleet,
            clock=clock,
            application=application,
            sockets=sockets,
        )


async def _context(stack: AsyncExitStack, config: DaemonConfig) -> tuple[ControllerContext, DatabaseClock, bool]:
    """Return (context of the controllers, the database's clock, True if the sweep must only report)."""
    dsn = config.database_url or await _embedded(stack, config.home)
    await migrate(dsn, before=partial(mark_new, config.home))
    store = await PostgresStore.connect(dsn)
    stack.push_async_callback(store.close)
    clock = DatabaseClock(store, SystemClock(), counted=boot_seconds, anchors=AnchorFile(path=config.home / CLOCK_FILE))
    await clock.start()
    await store.repair_due_times()  # the clock may have been set back while no broker ran
    installation = await installation_of(store, config.home)
    grants = replace(grants_of(config), now=clock.now)
    blobs = ObstoreBlobs.open(config.blobs_url, installation, options=config.blob_options, grants=grants)
    await refuse_other_blobs(store, blobs)
    providers = build(
        config.providers, installation=installation, state=config.home / "providers", clock=clock, blobs=blobs,
        launches=True, sandbox=(sandbox := host_sandbox(config)),
    )  # fmt: skip
    providers = gated(providers, config.providers.rented(), clock)
    for provider in providers.values():
        stack.push_async_callback(provider.close)
    identity = seat_of(config.home, providers, await store.database())
    await refuse_conflicting_brokers(blobs, clock, identity)
    await _refuse_lost_providers(store, set(providers))
    context = ControllerContext(
        installation=installation,
        owner=f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(3)}",
        store=store,
        blobs=blobs,
        providers=providers,
        clock=clock,
        intervals=intervals_of(config),
        identity=identity,
        limits=Limits(**config.limits.model_dump()),
        costs=costs_of(config),
        forbidden=partial(forbidden, config.trainer.remote_code),
        is_clock_right=clock.is_right,
        host_admission=HostAdmissions(store, host_rules(config), clock, sandbox.problem),
        plans=SpotPlanner.within(stack),
    )
    return context, clock, only_report(config.home)


async def _market(context: ControllerContext, config: DaemonConfig) -> MarketPoller:
    """Return a market poller. Its first prices are present if the clouds answer within `FIRST_PRICES_S`."""
    market = MarketPoller(context.providers, context.clock, MarketIntervals(poll_s=config.intervals.market_s))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_PRICES_S):
            await market.step()
    return market


async def _embedded(stack: AsyncExitStack, home: Path) -> str:
    server = await stack.enter_async_context(await EmbeddedPostgres.start(home / "postgres"))
    return server.dsn


async def _refuse_lost_providers(store: Store, configured: set[str]) -> None:
    """Raise ProviderMissing if a live attempt uses a provider that is not configured.

    Without this provider, the broker could neither watch nor destroy the attempt's machine.
    """
    for live in await store.live_attempts():
        provider = live.attempt.line.offer.provider
        if provider not in configured:
            raise ProviderMissing(
                f"attempt {live.attempt.id} of job {live.job.id} still runs at {provider!r}, which providers in "
                f"{CONFIG_FILE} no longer lists; restore it until that job has ended"
            )


def grants_of(config: DaemonConfig) -> GrantSettings:
    """Return the settings of the credentials of attempts."""
    return GrantSettings(**config.grants.model_dump())


def costs_of(config: DaemonConfig) -> CostSettings:
    """Return the operator's settings of prices and retention."""
    retention, price = config.retention.model_dump(), config.storage_usd_per_gib_month
    if price is None:
        price = storage_usd_per_gib_month(config.blobs_url, options_of(config.blobs_url, config.blob_options))
    return CostSettings(
        price_rise=config.guard.price_rise_percent / 100,
        storage_usd_per_gib_month=price,
        uploads_days=retention.pop("uploads_days"),
        retention=Retention(**retention),
    )


def intervals_of(config: DaemonConfig) -> Intervals:
    """Return the polling intervals, with at most as many concurrent creates as SkyPilot has concurrent launches.

    A create that waits in the broker costs nothing, and the broker checks its price again before it sends the create.
    """
    intervals = Intervals(**config.intervals.model_dump())
    if not config.providers.rented():
        return intervals
    return replace(intervals, creates=min(intervals.creates, config.providers.sky.launches))


def keep_of(config: DaemonConfig) -> OutboxRetention:
    """Return the limits of deliveries that wait for a channel."""
    return OutboxRetention(age_s=config.notify.keep_days * 86_400, rows=config.notify.keep_deliveries)


def _service(
    config: DaemonConfig, context: ControllerContext, market: MarketPoller, box: SecretBox,
    notifiers: Sequence[Notifier], *, clock: DatabaseClock, fleet: Fleet,
) -> Service:  # fmt: skip
    settings = Settings(
        spool=config.home / SPOOL,
        blobs=folder_of(config.blobs_url),
        upload_bytes=config.upload_max_bytes,
        data_hosts=config.data_hosts,
        lease_stale_s=max(90.0, 4 * config.intervals.deadman_s),
        storage_usd_per_gib_month=context.costs.storage_usd_per_gib_month,
        drain_budget=context.drain_budget,
    )
    folders = model_folders(config, context)
    preflight = Checks(HubClient.of_environment(os.environ), context.clock, config.trainer.remote_code, folders)
    return Service(
        store=context.store, blobs=context.blobs,
        quotes=QuoteService(
            context.store, context.blobs, market, preflight, context.clock, settings,
            entropy=os.urandom, learned=fleet.learned, host_access=context.host_admission, plans=context.plans,
        ),
        box=box, clock=context.clock, entropy=os.urandom, notifiers=notifiers, settings=settings,
        hooks=DaemonHooks(
            reach=partial(_reach, context.providers),
            check_providers=partial(_check_providers, context.providers),
            skew=lambda: clock.skew_s,
            clock_step=lambda: clock.step_s,
            claim_fault=context.claim_watch.fault,
            orphans=fleet.orphans,
        ),
    )  # fmt: skip


async def _reach(providers: Mapping[str, Provider], handle: Handle, command: Sequence[str], tty: bool) -> Sequence[str]:
    """Return the command line that runs `command` on a machine. Raises Rejected if its provider is not configured."""
    if (provider := providers.get(handle.provider)) is None:
        return await nowhere(handle, command, tty)
    return await provider.reach(handle, command, tty=tty)


async def _check_providers(providers: Mapping[str, Provider]) -> dict[str, CredentialCheck]:
    async def check(provider: Provider) -> str | None:
        try:
            async with asyncio.timeout(CHECK_S):
                return await provider.check()
        except TimeoutError:
            return f"no answer within {CHECK_S:.0f} s; check the network"
        except Exception as e:  # a fault in one provider must not hide the results of the others
            log.exception("checking %s failed", provider.name)
            return f"{type(e).__name__} while it was checked; see the daemon's log"

    problems = await asyncio.gather(*map(check, providers.values()))
    checked = zip(providers.items(), problems, strict=True)
    return {
        name: CredentialCheck(problem=problem, identity=checkable.identity) for (name, checkable), problem in checked
    }


# --------------------------------------------------------------------------------------------------------- the network


async def write_client_file(components: DaemonComponents, at: Addresses) -> None:
    """Write the file from which this user's CLI reads the daemon's address and token.

    A token in the file that is still valid stays, so that clients work after a restart.
    """
    file = components.config.home / CLIENT_FILE
    text = await _known_token(components.store, file) or await _new_token(components)
    document = {"url": at.url, "grpc": at.grpc, "certificate": at.certificate, "token": text}
    write_private(file, json.dumps(document).encode())


async def _known_token(store: Store, file: Path) -> str | None:
    try:
        text = json.loads(file.read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) and await store.token(hashed(text)) else None


async def _new_token(components: DaemonComponents) -> str:
    token_id, text = mint(os.urandom)
    token = Token(
        id=token_id,
        owner=LOCAL_OWNER,
        scopes=("read", "submit", "manage", "admin"),
        created_at=components.fleet.context.clock.now(),
        note=f"the operator of {socket.gethostname()}",
    )
    await components.store.put_token(token, hashed(text))
    return text
