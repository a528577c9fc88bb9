"""`gpubroker doctor`: checks of the setup, one line each, with a fix for every problem."""

import importlib.util
import shutil
from dataclasses import asdict, dataclass
from typing import Any

from broker.api.schemas.offers import ProviderView
from broker.blobs.bucket_check import check_bucket, check_grants
from broker.blobs.connect import folder_of
from broker.cli.core import formatting as words
from broker.client.async_client import AsyncClient
from broker.client.transport import connection
from broker.client.transport.errors import ApiError, ClientError, Misconfigured
from broker.daemon.config import DaemonConfig
from broker.domain.errors import BlobError, InvalidInput
from broker.paths import CONFIG_FILE

TRAINER = ("torch", "transformers", "accelerate", "peft", "safetensors")
TOOLS = {"rsync": "rsync", "ssh": "openssh-client"}
"""Programs that SkyPilot calls on this machine, with the package that contains each."""
MIN_FREE_BYTES = 5 * 1024**3
PARTS = {
    "database": "see the daemon's log; GPUBROKER_DATABASE_URL names another server",
    "blobs": "check the store's credentials with `gpubroker blobs init URL`",
    "broker": "restart `gpubroker serve` and see its log",
}
"""Fix of each part that the daemon's readiness check reports."""


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """Result of one check."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def document(check: DoctorCheck) -> dict[str, Any]:
    return asdict(check)


def line(check: DoctorCheck) -> str:
    """Return `ok       database: ok`, or `PROBLEM  blobs: ...; fix`."""
    fix = f"; {check.fix}" if check.fix and not check.ok else ""
    return f"{'ok' if check.ok else 'PROBLEM':<8} {check.name}: {check.detail}{fix}"


async def run() -> list[DoctorCheck]:
    """Run every check, even after a failure. Checks of this machine are skipped if the daemon is remote."""
    try:
        daemon = connection.find()
    except Misconfigured as e:  # whether the daemon runs on this machine is unknown too
        return [DoctorCheck(name="daemon", ok=False, detail=str(e))]
    checks = await _daemon(daemon)
    if daemon is None or daemon.source == str(connection.local_file()):
        checks += await _machine()
    return checks


async def _daemon(daemon: connection.Connection | None) -> list[DoctorCheck]:
    if daemon is None:
        fix = "run `gpubroker serve` or `gpubroker login URL`"
        return [DoctorCheck(name="daemon", ok=False, detail="none is configured", fix=fix)]
    async with AsyncClient(daemon.url, daemon.token, certificate=daemon.certificate) as client:
        try:
            health = await client.ready()
        except ClientError as e:
            fix = f"run `gpubroker serve`, or correct {daemon.source}"
            return [DoctorCheck(name="daemon", ok=False, detail=str(e), fix=fix)]
        checks = [DoctorCheck(name="daemon", ok=True, detail=f"answers at {daemon.url}")]
        checks += [
            DoctorCheck(name=part, ok=status == "ok", detail=status, fix=PARTS.get(part, ""))
            for part, status in health.checks.items()
        ]
        try:
            me = await client.me()
        except ApiError as e:
            fix = "set GPUBROKER_TOKEN, or run `gpubroker login URL`"
            return [*checks, DoctorCheck(name="token", ok=False, detail=str(e), fix=fix)]
        return [
            *checks,
            DoctorCheck(name="token", ok=True, detail=f"{me.owner} of {me.team} ({', '.join(me.scopes)})"),
            *await _providers(client, ask="admin" in me.scopes),
        ]


async def _providers(client: AsyncClient, *, ask: bool) -> list[DoctorCheck]:
    """Return one check per provider: its number of offers, and for admins (`ask`) whether its credentials work."""
    try:
        page = await (client.check_providers() if ask else client.providers())
    except ClientError as e:
        return [DoctorCheck(name="providers", ok=False, detail=str(e), fix="see the daemon's log")]
    if not page.items:
        fix = f"configure providers in {CONFIG_FILE}; see docs/design/providers.md"
        return [DoctorCheck(name="providers", ok=False, detail="none is configured", fix=fix)]
    return [_provider(status, has_credentials_checked=ask) for status in page.items]


def _provider(status: ProviderView, *, has_credentials_checked: bool) -> DoctorCheck:
    problem = status.problem or status.error
    detail = problem or f"{'credentials work, ' if has_credentials_checked else ''}{status.offers} offers"
    if problem is None and status.self_stop == "none":
        detail += "; its machines cannot stop themselves: run `gpubroker sweep` on a second machine as a safety net"
    return DoctorCheck(name=status.name, ok=problem is None, detail=detail)


async def _machine() -> list[DoctorCheck]:
    try:
        config = DaemonConfig.load()
    except InvalidInput as e:
        return [DoctorCheck(name="configuration", ok=False, detail=str(e), fix="correct the file")]
    runs_jobs_here = config.providers.local is not None or config.providers.simulated is not None
    checks = [
        await _blobs(config),
        *(await _rented(config) if config.providers.rented() else ()),
        *([_trainer()] if runs_jobs_here else []),
    ]
    folder = next(p for p in (config.home, *config.home.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    detail, fix = f"{words.size(free)} free at {folder}", "free disk space, or move the home"
    return [*checks, DoctorCheck(name="disk", ok=free >= MIN_FREE_BYTES, detail=detail, fix=fix)]


def _trainer() -> DoctorCheck:
    """Check the trainer's packages, which jobs on this machine need."""
    missing = [name for name in TRAINER if importlib.util.find_spec(name) is None]
    detail = f"{', '.join(missing)} not installed" if missing else "importable: local and simulated jobs can run"
    fix = "pip install 'gpubroker[trainer]', or set providers.local to null if no job runs on this machine"
    return DoctorCheck(name="trainer", ok=not missing, detail=detail, fix=fix)


async def _rented(config: DaemonConfig) -> list[DoctorCheck]:
    """Check the requirements of rented machines: SkyPilot's tools, the trainer image and scoped credentials."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    image = f"machines run {config.trainer.image}" if config.trainer.image else "unset: machines install this trainer"
    checks = [
        *([] if config.providers.sky.url is not None else [_skypilot(config)]),
        DoctorCheck(
            name="skypilot tools",
            ok=not missing or config.providers.sky.url is not None,
            detail=f"{', '.join(missing)} not installed" if missing else f"{', '.join(TOOLS)} installed",
            fix=f"apt-get install {' '.join(TOOLS[t] for t in missing)}, or the packages of your system",
        ),
        DoctorCheck(name="trainer image", ok=True, detail=image),
    ]
    if folder_of(config.blobs_url) is not None:
        detail = "rented machines cannot reach a local folder"
        return [*checks, DoctorCheck(name="grants", ok=False, detail=detail, fix="set blobs to s3://, gs:// or az://")]
    from broker.daemon.app import grants_of

    warning = await check_grants(config.blobs_url, options=config.blob_options, grants=grants_of(config))
    detail = warning or "each attempt gets credentials for only its own part of the blob store"
    return [*checks, DoctorCheck(name="grants", ok=warning is None, detail=detail)]


def _skypilot(config: DaemonConfig) -> DoctorCheck:
    """Check SkyPilot's environment, in which machines of rented clouds are launched."""
    from providers.skypilot.environment import problem

    python = config.providers.sky.interpreter(config.home / "providers")
    detail, _, fix = (problem(python) or f"installed: {python}").partition("; ")
    return DoctorCheck(name="skypilot", ok=not fix, detail=detail, fix=fix)


async def _blobs(config: DaemonConfig) -> DoctorCheck:
    """Test the required operations: conditional put, and list after put. A missing folder is not created."""
    try:
        folder = folder_of(config.blobs_url)
        if folder is not None and not folder.exists():
            detail = f"{folder} does not exist yet; `gpubroker serve` creates it"
            return DoctorCheck(name="blob store", ok=True, detail=detail)
        report = await check_bucket(config.blobs_url, options=config.blob_options)
    except (InvalidInput, BlobError, OSError) as e:
        return DoctorCheck(name="blob store", ok=False, detail=str(e), fix="see `gpubroker blobs init URL`")
    failed = [f"{c.name}: {c.detail}" for c in report.checks if not c.ok]
    detail = "; ".join(failed) or f"{config.blobs_url}: " + ", ".join(c.name for c in report.checks)
    return DoctorCheck(name="blob store", ok=not failed, detail=detail, fix="see `gpubroker blobs init URL`")
