"""A fine-tune on this machine alone: the same agent, over a blob store in the output folder."""

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trainer import checkpoint, fit, trust
from trainer.agent import gpus as load
from trainer.agent.environment import Environment
from trainer.agent.run import EXIT, Agent
from trainer.blobs import Objects, connect
from trainer.checkpoint import Origin
from trainer.contract import keys, places, yamlfile
from trainer.contract.base import Config
from trainer.contract.data import DataError, digest
from trainer.contract.rendezvous import AttemptSpec, DataFile, ExitCode, Limits, Outcome, Parallelism, World
from trainer.contract.train import CheckpointConfig, TrainConfig

C = TypeVar("C", bound=Config)
ME = "standalone"
RESULTS = ("adapter", "model", "metrics.jsonl", "tensorboard", "samples.json", "samples", "eval.json", "README.md")


class BadConfig(ValueError):
    """The configuration cannot be used; the message names the place and the fix."""


def main(
    config: Path,
    output: Path,
    save_every_s: float | None = None,
    *,
    fsdp: bool = False,
    ways: Mapping[str, int] | None = None,
    trusted: bool = False,
) -> int:
    """Trains, or goes on where the last run in `output` was stopped; returns the contract's exit code.

    `save_every_s`: in the place of the spec's `checkpoint.every_s`. `ways`: of `tensor` and `context`, how many GPUs;
    more than one comes with `fsdp`. `trusted`: the model's own code may be run here.
    """
    several = {name: count for name, count in (ways or {}).items() if count != 1}
    try:
        how = Parallelism.model_validate({"kind": "fsdp" if fsdp or several else "ddp", **several})
    except ValidationError as e:
        print(f"--{e.errors()[0]['loc'][-1]}: {e.errors()[0]['msg']}", file=sys.stderr)
        return 64
    try:
        train, saving = read_config(config), read_saving(config, save_every_s)
        if wrong := trust.unpermitted(train, given=trusted):
            raise BadConfig(wrong)
        outcome = asyncio.run(_run(train, saving, config.parent, output.resolve(), how))
    except (BadConfig, OSError) as e:
        print(f"{config}: {e}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except DataError as e:
        print(f"{config}: {e}", file=sys.stderr)
        return ExitCode.INFRASTRUCTURE if isinstance(e, places.Unreachable) else ExitCode.DATA
    return int(EXIT[outcome])


def read_config(path: Path) -> TrainConfig:
    """A TrainConfig, or the `train` part of a job's spec. Raises BadConfig naming the key."""
    return _valid(TrainConfig, _read(path)[0])


def read_saving(path: Path, save_every_s: float | None) -> CheckpointConfig:
    """The `checkpoint` part of a job's spec, the default where there is none. Raises BadConfig naming the key.

    `save_every_s`: in the place of its `every_s`.
    """
    saving = _valid(CheckpointConfig, _read(path)[1], "checkpoint")
    if save_every_s is None:
        return saving
    return _valid(CheckpointConfig, saving.model_dump() | {"every_s": save_every_s}, "--save-every")


def _read(path: Path) -> tuple[Any, Any]:
    """(what to train, when to save), as they are written. Raises BadConfig."""
    try:
        found = yamlfile.parse(path.read_text("utf-8-sig"), str(path)).data
    except yamlfile.BadYaml as e:
        raise BadConfig(f"line {e.line}: {e.message}") from None
    except UnicodeDecodeError as e:
        raise BadConfig(f"byte {e.start} is not UTF-8; save the file as UTF-8") from None
    if "model" in found or not ("train" in found or "script" in found):
        return found, {}
    if found.get("train") is None:
        raise BadConfig("train: the spec has none; a script's data and model are not known")
    return found["train"], found.get("checkpoint", {})


def _valid(kind: type[C], found: Any, *place: str) -> C:
    """Raises BadConfig naming the key."""
    try:
        return kind.model_validate(found)
    except ValidationError as e:
        first: Any = e.errors()[0]
        raise BadConfig(f"{'.'.join([*place, *map(str, first['loc'])])}: {first['msg']}") from None


async def _run(train: TrainConfig, saving: CheckpointConfig, beside: Path, output: Path, how: Parallelism) -> Outcome:
    store = output / "store"
    store.mkdir(parents=True, exist_ok=True)
    objects = Objects(connect(store.as_uri(), {}), ME)
    before = [k for k in await objects.keys("attempts/") if k.endswith("/spec.json")]
    number = len(before) + 1
    data, candidates = await _put_data(objects, train, beside), await _candidates(objects)
    if before and candidates:
        await _same_data(objects, before[-1], data, train.data.path)
    attempt = f"{ME}-{number:04d}"
    train = await _sized(train, how)
    spec = AttemptSpec(
        installation=ME,
        job=ME,
        attempt=attempt,
        number=number,
        run=await _run_name(objects),
        train=train,
        data=data,
        checkpoint=saving,
        resume_from=candidates,
        world=World(gpus_per_node=gpus(), parallelism=how),
        limits=Limits(deadman_s=0),
    )
    await objects.create(keys.spec(attempt), spec.model_dump_json().encode())
    env = Environment(blobs=store.as_uri(), installation=ME, attempt=attempt, workdir=output / "work")
    outcome = await Agent(env, echo=print, folder=output).run()
    if outcome is Outcome.COMPLETED:
        _publish(store / ME, (await checkpoint.own(objects, Origin(job=ME, attempt=attempt, kind="train")))[0], output)
    shutil.rmtree(output / "work", ignore_errors=True)
    return outcome


async def _sized(train: TrainConfig, how: Parallelism) -> TrainConfig:
    """With as many rows at once as fit the GPUs of this machine; a CPU gains nothing by more of them."""
    processes = gpus()
    memory = load.memory_bytes() if processes and how == Parallelism() else None
    if memory is None:
        return train
    found, told = await asyncio.to_thread(fit.sized, train, memory=memory, processes=processes)
    if told:
        print(told)
    return found


async def _run_name(objects: Objects) -> str:
    """The same whenever it goes on in this folder."""
    await objects.create("run", f"{ME}-{secrets.token_hex(6)}".encode())
    found = await objects.read("run")
    assert found is not None
    return found.decode()


async def _put_data(objects: Objects, train: TrainConfig, beside: Path) -> DataFile:
    """The data set's copy in the store. Raises DataError, OSError."""
    with places.gathered(train.data, beside) as found:
        sha256 = digest(found.path)
        key = keys.job_data(ME, sha256)
        if key not in await objects.keys(keys.JOB_DATA):
            await objects.upload(key, found.path)
            if digest(found.path) != sha256:
                await objects.delete(key)
                raise DataError(f"data.path: {train.data.path} was changed while it was read; start again")
        return DataFile(key=key, sha256=sha256, bytes=found.path.stat().st_size, format=found.format)


async def _same_data(objects: Objects, before: str, data: DataFile, path: str) -> None:
    """Raises BadConfig where an earlier attempt had other data: the order of its rows would mean nothing."""
    text = await objects.read(before)
    began = AttemptSpec.model_validate_json(text).data if text else None
    if began is not None and began.sha256 != data.sha256:
        raise BadConfig(
            f"data.path: {path} has changed since this run began (sha256 {began.sha256[:12]}..., now "
            f"{data.sha256[:12]}...); give it back as it was, or another --output"
        )


async def _candidates(objects: Objects) -> tuple[str, ...]:
    found = await objects.keys(keys.checkpoints(ME))
    return tuple(k for k in reversed(found) if k.endswith(f"/{keys.MANIFEST}"))


def gpus() -> int:
    """GPUs that the driver shows; torch is not asked, as this process never imports it."""
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if os.access(p, os.R_OK)])


def _publish(store: Path, manifest: str, output: Path) -> None:
    """Copies the results out of the complete checkpoint."""
    folder = (store / manifest).parent
    for name in RESULTS:
        source = folder / name
        if source.is_dir():
            shutil.copytree(source, output / name, dirs_exist_ok=True)
        elif source.exists():
            shutil.copyfile(source, output / name)
