"""`gpubroker doctor`: one line for each thing that a job needs, and the fix where it is wrong."""

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
"""That SkyPilot calls on this machine, and the package that has each."""
LEAST_FREE_BYTES = 5 * 1024**3
PARTS = {
    "database": "see the daemon's log; GPUBROKER_DATABASE_URL names another server",
    "blobs": "check the store's credentials with `gpubroker blobs init URL`",
    "broker": "restart `gpubroker serve` and see its log",
}


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    name: str
    ok: bool
    detail: str
    fix: str = ""


def document(check: DoctorCheck) -> dict[str, Any]:
    return asdict(check)


def line(check: DoctorCheck) -> str:
    """`ok       database: ok`, or `PROBLEM  blobs: ...; fix`."""
    fix = f"; {check.fix}" if check.fix and not check.ok else ""
    return f"{'ok' if check.ok else 'PROBLEM':<8} {check.name}: {check.detail}{fix}"


async def run() -> list[DoctorCheck]:
    """Everything, whatever else is wrong. What concerns this machine's daemon is left out for a remote one."""
    try:
        found = connection.find()
    except Misconfigured as e:  # which daemon is meant is not known, nor whether it is this machine's
        return [DoctorCheck(name="daemon", ok=False, detail=str(e))]
    checks = await _daemon(found)
    if found is None or found.source == str(connection.local_file()):
        checks += await _machine()
    return checks


async def _daemon(found: connection.Connection | None) -> list[DoctorCheck]:
    if found is None:
        return [
            DoctorCheck(
                name="daemon", ok=False, detail="none is known", fix="run `gpubroker serve` or `gpubroker login URL`"
            )
        ]
    async with AsyncClient(found.url, found.token, certificate=found.certificate) as client:
        try:
            health = await client.ready()
        except ClientError as e:
            fix = f"run `gpubroker serve`, or correct {found.source}"
            return [DoctorCheck(name="daemon", ok=False, detail=str(e), fix=fix)]
        checks = [DoctorCheck(name="daemon", ok=True, detail=f"answers at {found.url}")]
        checks += [
            DoctorCheck(name=part, ok=said == "ok", detail=said, fix=PARTS.get(part, ""))
            for part, said in health.checks.items()
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
    """One line a provider: what it sells; with `ask` (an admin's) also whether its credentials work."""
    try:
        found = await (client.check_providers() if ask else client.providers())
    except ClientError as e:
        return [DoctorCheck(name="providers", ok=False, detail=str(e), fix="see the daemon's log")]
    if not found.items:
        fix = f"configure providers in {CONFIG_FILE}; see docs/design/providers.md"
        return [DoctorCheck(name="providers", ok=False, detail="none is configured", fix=fix)]
    return [_provider(status, asked=ask) for status in found.items]


def _provider(status: ProviderView, *, asked: bool) -> DoctorCheck:
    said = status.problem or status.error
    detail = said or f"{'credentials work, ' if asked else ''}{status.offers} offers"
    if said is None and status.self_stop == "none":
        detail += "; its machines cannot stop themselves: run `gpubroker sweep` from a second machine as a net"
    return DoctorCheck(name=status.name, ok=said is None, detail=detail)


async def _machine() -> list[DoctorCheck]:
    try:
        config = DaemonConfig.load()
    except InvalidInput as e:
        return [DoctorCheck(name="configuration", ok=False, detail=str(e), fix="correct the file")]
    own = config.providers.local is not None or config.providers.simulated is not None
    checks = [
        await _blobs(config),
        *(await _rented(config) if config.providers.rented() else ()),
        *([_trainer()] if own else []),
    ]
    place = next(p for p in (config.home, *config.home.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    detail = f"{words.size(free)} free at {place}"
    return [
        *checks,
        DoctorCheck(name="disk", ok=free >= LEAST_FREE_BYTES, detail=detail, fix="free some space, or move the home"),
    ]


def _trainer() -> DoctorCheck:
    """For jobs on this machine; a broker that only rents does without."""
    missing = [name for name in TRAINER if importlib.util.find_spec(name) is None]
    detail = f"{', '.join(missing)} not installed" if missing else "importable: local and simulated jobs can run"
    fix = "pip install 'gpubroker[trainer]', or set providers.local to null where no job runs on this machine"
    return DoctorCheck(name="trainer", ok=not missing, detail=detail, fix=fix)


async def _rented(config: DaemonConfig) -> list[DoctorCheck]:
    """What launching on rented machines takes: SkyPilot's tools here, the trainer there, and scoped credentials."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    own = f"machines run {config.trainer.image}" if config.trainer.image else "unset: machines install this trainer"
    checks = [
        DoctorCheck(
            name="skypilot",
            ok=not lacking or config.providers.sky.url is not None,
            detail=f"{', '.join(lacking)} not installed" if lacking else f"{', '.join(TOOLS)} are there",
            fix=f"apt-get install {' '.join(TOOLS[t] for t in lacking)}, or what your system calls them",
        ),
        DoctorCheck(name="trainer image", ok=True, detail=own),
    ]
    if folder_of(config.blobs_url) is not None:
        detail = "a folder cannot be reached by rented machines"
        return [*checks, DoctorCheck(name="grants", ok=False, detail=detail, fix="set blobs to s3://, gs:// or az://")]
    from broker.daemon.app import grants_of

    warning = await check_grants(config.blobs_url, options=config.blob_options, grants=grants_of(config))
    detail = warning or "each attempt gets credentials for its own part of the blob store, and no more"
    return [*checks, DoctorCheck(name="grants", ok=warning is None, detail=detail)]


async def _blobs(config: DaemonConfig) -> DoctorCheck:
    """What the protocol rests on, tried: conditional put, LIST after put. A folder that is missing stays so."""
    try:
        folder = folder_of(config.blobs_url)
        if folder is not None and not folder.exists():
            return DoctorCheck(
                name="blob store", ok=True, detail=f"{folder} is not there yet; `gpubroker serve` makes it"
            )
        report = await check_bucket(config.blobs_url, options=config.blob_options)
    except (InvalidInput, BlobError, OSError) as e:
        return DoctorCheck(name="blob store", ok=False, detail=str(e), fix="see `gpubroker blobs init URL`")
    wrong = [f"{c.name}: {c.detail}" for c in report.checks if not c.ok]
    detail = "; ".join(wrong) or f"{config.blobs_url}: " + ", ".join(c.name for c in report.checks)
    return DoctorCheck(name="blob store", ok=not wrong, detail=detail, fix="see `gpubroker blobs init URL`")
