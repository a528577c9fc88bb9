"""Checks of `gpubroker doctor` on the daemon's machine: configuration, blob store, programs, trainer and disk."""

import importlib.util
import shutil

from broker.blobs.bucket_check import check_bucket, check_grants
from broker.blobs.connect import folder_of
from broker.cli.core import formatting
from broker.cli.operator.doctor_check import DoctorCheck
from broker.daemon.config import DaemonConfig
from broker.domain.errors import BlobError, InvalidInput

TRAINER = ("torch", "transformers", "accelerate", "peft", "safetensors")
TOOLS = {"rsync": "rsync", "ssh": "openssh-client"}
"""Programs that SkyPilot calls on this machine, with the package that contains each."""
MIN_FREE_BYTES = 5 * 1024**3


async def machine_checks() -> list[DoctorCheck]:
    """Return the checks of this machine, on which the daemon runs or may run."""
    try:
        config = DaemonConfig.load()
    except InvalidInput as e:
        return [DoctorCheck(name="configuration", ok=False, detail=str(e), fix="correct the file")]
    runs_jobs_here = config.providers.local is not None or config.providers.simulated is not None
    checks = [
        await _blobs(config),
        *(await _rented(config) if config.providers.rented() else ()),
        *([_trainer(), await _host_jobs(config)] if runs_jobs_here else []),
    ]
    folder = next(p for p in (config.home, *config.home.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    detail, fix = f"{formatting.size(free)} free at {folder}", "free disk space, or move the home"
    return [*checks, DoctorCheck(name="disk", ok=free >= MIN_FREE_BYTES, detail=detail, fix=fix)]


def _trainer() -> DoctorCheck:
    """Check the trainer's packages, which jobs on this machine need."""
    missing = [name for name in TRAINER if importlib.util.find_spec(name) is None]
    detail = f"{', '.join(missing)} not installed" if missing else "importable: local and simulated jobs can run"
    fix = "pip install 'gpubroker[trainer]', or set providers.local to null if no job runs on this machine"
    return DoctorCheck(name="trainer", ok=not missing, detail=detail, fix=fix)


async def _host_jobs(config: DaemonConfig) -> DoctorCheck:
    """Report whether jobs of several users may run on this machine, and how they are isolated."""
    from broker.daemon.host_admissions import host_sandbox

    local = config.providers.local
    admitted = f"operators and {', '.join(local.teams if local else ()) or 'no team'}"
    if local is not None and local.trusted:
        return DoctorCheck(name="host jobs", ok=True, detail=f"trusted: {admitted} can read the daemon's keys")
    sandbox = host_sandbox(config)
    if problem := await sandbox.problem():
        detail = f"for a single user on loopback only, because jobs cannot be isolated: {problem}"
        return DoctorCheck(name="host jobs", ok=True, detail=detail)
    if (path := sandbox.unreadable()) is not None:
        detail = f"isolated jobs cannot read {path}, because other users of this host cannot"
        return DoctorCheck(name="host jobs", ok=False, detail=detail, fix=f"chmod -R o+rX {path.parent}")
    return DoctorCheck(name="host jobs", ok=True, detail=f"with several users: {admitted}, in {sandbox.description}")


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
