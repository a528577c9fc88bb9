"""Fine-tune on this machine without a broker: the same agent, over a blob store in the output folder."""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from trainer.agent.agent import Agent
from trainer.agent.base import gpus as load
from trainer.agent.base.environment import Environment
from trainer.checkpoint import protocol
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys
from trainer.contract.documents import AttemptSpec, DataFile, ExitCode, Limits, Outcome, Parallelism, World
from trainer.contract.train import CheckpointConfig, TrainConfig
from trainer.core import disk_space
from trainer.core.config_file import BadConfig, first_problem, read_config, read_saving
from trainer.core.errors import EXIT
from trainer.core.ipc import RunFolder
from trainer.dataset import batch_defaults, example_counts, sources
from trainer.dataset.prompts import DataError, digest
from trainer.models import remote_code
from trainer.objectstore.objects import Objects, ObjectStoreError, connect
from trainer.standalone import micro_batch, pending_checkpoint, resume_check
from trainer.standalone.output_dir import STORE, BadOutput, holding

STANDALONE = "standalone"
RESULTS = ("adapter", "model", "metrics.jsonl", "tensorboard", "samples.json", "samples", "eval.json", "README.md")


class OutputDiskFull(Exception):
    """The disk is full; the message is one line: what was not written, the bytes needed, and the fix."""


@contextlib.contextmanager
def _checking_disk(purpose: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """Raise OutputDiskFull instead of errors that report that the disk of `folder` cannot hold `needed_bytes` bytes."""
    try:
        yield
    except (ObjectStoreError, OSError) as e:
        if not disk_space.is_full(e):
            raise
        raise OutputDiskFull(
            f"{purpose} could not be written: {disk_space.disk_full_message(folder, needed_bytes)}; "
            "start again then, and the run resumes"
        ) from e


def main(
    config: Path,
    output: Path,
    save_every_s: float | None = None,
    *,
    fsdp: bool = False,
    mesh_sizes: Mapping[str, int] | None = None,
    trusted: bool = False,
) -> int:
    """Train, or resume the last run in `output`; return the contract's exit code.

    `save_every_s` replaces the spec's `checkpoint.every_s`. `mesh_sizes`: number of GPUs for `tensor` and `context`; a
    number above 1 implies `fsdp`. `trusted`: the model's own code may run here.
    """
    several = {name: count for name, count in (mesh_sizes or {}).items() if count != 1}
    try:
        parallelism = Parallelism.model_validate({"kind": "fsdp" if fsdp or several else "ddp", **several})
    except ValidationError as e:
        print(f"--{': '.join(first_problem(e, Parallelism, several))}", file=sys.stderr)
        return ExitCode.USER_ERROR
    try:
        train, saving = read_config(config), read_saving(config, save_every_s)
        if wrong := remote_code.permission_problem(train, flag=trusted):
            raise BadConfig(wrong)
        secret_values = _secrets(train)
        with holding(output):
            outcome = asyncio.run(_run(train, saving, config.parent, output.resolve(), parallelism, secret_values))
    except BadOutput as e:
        print(e, file=sys.stderr)
        return ExitCode.USER_ERROR
    except (BadConfig, OSError) as e:
        print(f"{config}: {e}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except (OutputDiskFull, ObjectStoreError) as e:
        print(f"{output}: {e}", file=sys.stderr)
        return ExitCode.INFRASTRUCTURE
    except DataError as e:
        print(f"{config}: {e}", file=sys.stderr)
        return ExitCode.INFRASTRUCTURE if isinstance(e, sources.Unreachable) else ExitCode.DATA
    return int(EXIT[outcome])


def _secrets(train: TrainConfig) -> dict[str, str]:
    """Return the values in the environment of the secrets that the configuration names.

    Raises: BadConfig for a missing secret of the output, which would otherwise be noticed only after the training.
    """
    if missing := [name for name in train.output.secrets if not os.environ.get(name)]:
        raise BadConfig(f"output: the environment variable {missing[0]} is not set; set it to the secret's value")
    named = (*train.output.secrets, *train.metrics.secrets, *filter(None, (train.data.secret,)))
    return {name: os.environ[name] for name in named if os.environ.get(name)}


async def _run(
    train: TrainConfig,
    saving: CheckpointConfig,
    config_folder: Path,
    output: Path,
    parallelism: Parallelism,
    secret_values: dict[str, str],
) -> Outcome:
    store = output / STORE
    objects = Objects(connect(store.as_uri(), {}), STANDALONE)
    before = [k for k in await objects.keys("attempts/") if k.endswith("/spec.json")]
    await _commit_pending(objects, before, output / "work", store)
    candidates = await _candidates(objects)
    began = await _began(objects, before, candidates)
    data = await _put_data(objects, train, config_folder, store, began if candidates else None)
    origin = Origin(job=STANDALONE, attempt=f"{STANDALONE}-{len(before) + 1:04d}", kind="train")
    await _tidy(objects, origin, saving, train, data)  # a previous run that was killed did not tidy
    train = await _sized(await _batched(began, train, store / STANDALONE / data.key, data), parallelism)
    spec = AttemptSpec(
        installation=STANDALONE,
        job=STANDALONE,
        attempt=origin.attempt,
        number=len(before) + 1,
        run=await _run_name(objects),
        train=train,
        data=data,
        checkpoint=saving,
        date=(began and began.date) or datetime.now(UTC).date().isoformat(),
        resume_from=await _candidates(objects),
        world=World(gpus_per_node=gpus(), parallelism=parallelism),
        limits=Limits(deadman_s=0),
    )
    await objects.create(object_keys.spec(origin.attempt), spec.model_dump_json().encode())
    env = Environment(blobs=store.as_uri(), installation=STANDALONE, attempt=origin.attempt, workdir=output / "work")
    outcome = await Agent(env, echo=print, folder=output, secrets=secret_values).run()
    if outcome is Outcome.COMPLETED:
        _publish(store / STANDALONE, (await protocol.own_manifests(objects, origin))[0], output)
    await _tidy(objects, origin, saving, train, data)
    _clean_up(env.workdir, store)
    return outcome


def _clean_up(work: Path, store: Path) -> None:
    """Remove the work folder, or report the checkpoint that it still has to hold."""
    if message := pending_checkpoint.clean_up(work, RunFolder(root=work / "run"), store):
        print(message, file=sys.stderr)


async def _commit_pending(objects: Objects, before: Sequence[str], work: Path, store: Path) -> None:
    """Commit the previous run's checkpoint that its store could not hold. Raises: OutputDiskFull, ObjectStoreError."""
    if before and (snapshot := pending_checkpoint.pending_snapshot(RunFolder(root=work / "run"))) is not None:
        origin = Origin(job=STANDALONE, attempt=before[-1].split("/")[1], kind="train")
        with _checking_disk(pending_checkpoint.named(snapshot), store, disk_space.tree_bytes(snapshot)):
            await pending_checkpoint.commit_pending(objects, origin, snapshot)


async def _began(objects: Objects, before: Sequence[str], candidates: Sequence[str]) -> AttemptSpec | None:
    """Return the spec of the start that left the newest checkpoint, or of the first start. Raises: BadOutput."""
    spec_keys = [object_keys.spec(key.split("/")[2]) for key in candidates[:1]]
    key = (spec_keys or [*before, ""])[0]
    text = await objects.read(key) if before else None
    try:
        return AttemptSpec.model_validate_json(text) if text else None
    except ValidationError:
        raise BadOutput(f"{STORE}/{STANDALONE}/{key} of --output cannot be read; give another --output") from None


async def _batched(began: AttemptSpec | None, train: TrainConfig, path: Path, data: DataFile) -> TrainConfig:
    """Return the configuration with a number for `global_batch: auto`; a resumed run keeps its first number.

    Raises: DataError.
    """
    if train.global_batch != "auto":
        return train
    if began is not None and began.train is not None and began.data is not None and began.data.sha256 == data.sha256:
        print(f"global_batch auto: {began.train.global_batch}, as before")
        return train.model_copy(update={"global_batch": began.train.global_batch})
    rows = await asyncio.to_thread(example_counts.count_file, path, data.format, train.data)
    batch, message = batch_defaults.resolve_global_batch(train, rows)
    print(message)
    return batch


async def _sized(train: TrainConfig, parallelism: Parallelism) -> TrainConfig:
    """Return the configuration with a micro-batch that fits the GPUs; on a CPU, larger ones are not faster."""
    processes = gpus()
    memory = load.memory_bytes() if processes and parallelism == Parallelism() else None
    if memory is None:
        return train
    sized, message = await asyncio.to_thread(micro_batch.sized, train, memory=memory, processes=processes)
    if message:
        print(message)
    return sized


async def _run_name(objects: Objects) -> str:
    """Return the name of the run, the same for each resume in this folder."""
    await objects.create("run", f"{STANDALONE}-{secrets.token_hex(6)}".encode())
    mark = await objects.read("run")
    assert mark is not None
    return mark.decode()


async def _put_data(
    objects: Objects, train: TrainConfig, config_folder: Path, store: Path, resumed: AttemptSpec | None
) -> DataFile:
    """Return the dataset's copy in the store.

    `resumed`: the run that is resumed.

    Raises: BadConfig, DataError, OSError, OutputDiskFull.
    """
    with sources.readable(train.data, config_folder) as readable:
        sha256 = digest(readable.path)
        key = object_keys.job_data(STANDALONE, sha256)
        data = DataFile(key=key, sha256=sha256, bytes=readable.path.stat().st_size, format=readable.format)
        if resumed is not None and (wrong := resume_check.changed(resumed, data, train)):
            raise BadConfig(wrong)
        if key not in await objects.keys(object_keys.JOB_DATA):
            with _checking_disk("the copy of the data", store, readable.path.stat().st_size):
                await objects.upload(key, readable.path)
            if digest(readable.path) != sha256:
                await objects.delete(key)
                raise DataError(f"data.path: {train.data.path} was changed while it was read; start again")
        return data


async def _tidy(objects: Objects, origin: Origin, saving: CheckpointConfig, train: TrainConfig, data: DataFile) -> None:
    """Remove what no later run needs: old checkpoints, abandoned token caches, and copies of other data."""
    with contextlib.suppress(ObjectStoreError):  # the next run removes it
        await protocol.prune(objects, origin, saving, train.guard, earlier=True)
        for key in await objects.keys(object_keys.JOB_DATA):
            if key != data.key:
                await objects.delete(key)


async def _candidates(objects: Objects) -> tuple[str, ...]:
    keys = await objects.keys(object_keys.checkpoints(STANDALONE))
    return tuple(object_keys.manifests(reversed(keys)))


def gpus() -> int:
    """Return the number of GPUs that the driver reports; this process never imports torch."""
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if os.access(p, os.R_OK)])


def _publish(store: Path, manifest: str, output: Path) -> None:
    """Copy the results out of the complete checkpoint, which stays. Raises: OutputDiskFull."""
    folder = store / object_keys.files_prefix(manifest)
    paths = [folder / name for name in RESULTS if (folder / name).exists()]
    needed_bytes = sum(disk_space.tree_bytes(p) if p.is_dir() else p.stat().st_size for p in paths)
    with _checking_disk("the results", output, needed_bytes):
        for source in paths:
            if source.is_dir():
                shutil.copytree(source, output / source.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, output / source.name)
