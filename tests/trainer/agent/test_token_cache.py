"""Token caches in the blob store: a later attempt uses them only if they equal the uploaded ones."""

import asyncio
import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import tiny_jobs
from tests.trainer.support.harness import JOB, Agent, Bench, until
from tests.trainer.support.tiny_jobs import KINDS
from tests.trainer.support.token_store import EXAMPLES, IDENTITY, MB, TokenStore
from trainer.agent.upload import token_cache as rows
from trainer.batching.examples import Example
from trainer.batching.mmap_dataset import MmapDataset
from trainer.contract import object_keys as keys
from trainer.contract.documents import Outcome, TokenCacheManifest
from trainer.contract.train import TrainConfig
from trainer.core.ipc import INDEX, NOTE, ROWS, rows_note
from trainer.objectstore.objects import Objects, ObjectStoreError

SomeLooks = Callable[["asyncio.Task[None]"], Awaitable[None]]


@pytest.fixture
def token_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    for name, value in {"PIECE": 1024, "AT_ONCE": 2, "POLL_S": 0.001, "RETRY_S": 0.001, "RETRY_FOR_S": 0.0}.items():
        monkeypatch.setattr(rows, name, value)
    return TokenStore(tmp_path)


@pytest.fixture
def some_looks(monkeypatch: pytest.MonkeyPatch) -> SomeLooks:
    """Wait until a sender has checked a few times whether it may send, or has ended."""
    sleep, looks = asyncio.sleep, 0

    async def counted(seconds: float) -> None:
        nonlocal looks
        looks += 1
        await sleep(seconds)

    async def some(sending: asyncio.Task[None]) -> None:
        until = looks + 4
        while looks < until and not sending.done():
            await sleep(0.001)

    monkeypatch.setattr(asyncio, "sleep", counted)
    return some


async def test_a_later_attempt_fetches_the_identical_token_cache(token_store: TokenStore) -> None:
    await token_store.sent(1)
    identity, folder = await token_store.fetched(2)
    assert identity == IDENTITY
    assert list(MmapDataset(folder, Example)) == EXAMPLES
    for name in rows.FILES:
        assert (folder / name).read_bytes() == (token_store.folder / "machine1" / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == sorted([*rows.FILES, "snapshots"])
    assert len(await token_store.keys()) > 6, "in pieces"


async def test_token_caches_lie_below_the_attempt_and_are_no_checkpoints(token_store: TokenStore) -> None:
    key = await token_store.sent(1)
    found = await token_store.keys()
    assert all(one.startswith(f"{keys.checkpoints(JOB)}a1/token-cache-{IDENTITY}-") for one in found)
    assert all(map(keys.is_in_token_cache, found))
    assert not [*keys.manifests(found)]
    assert key.endswith(keys.MANIFEST)


async def test_a_fetched_token_cache_is_not_uploaded_again_but_a_new_one_is(
    token_store: TokenStore, some_looks: SomeLooks
) -> None:
    await token_store.sent(1)
    run = token_store.tokenised(2)
    sending = asyncio.create_task(token_store.sender(2, run, known=IDENTITY).run())
    await some_looks(sending)
    assert len(await token_store.manifests()) == 1
    other = token_store.tokenised(2, identity="f" * 64)
    assert rows_note(other.root) is not None
    await sending
    assert [key for key in await token_store.manifests() if "/a2/token-cache-ffff" in key]
    assert (await token_store.fetched(3))[0] == "f" * 64, "what was made last"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def piece(name: str) -> Callable[[Path], Path]:
    return lambda folder: next((folder / "files" / name).iterdir())


def manifest(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / keys.MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return write


def swapped(folder: Path) -> None:
    """Swap pieces between token caches, so that each piece verifies but belongs to another cache."""
    path = folder / keys.MANIFEST
    made = TokenCacheManifest.model_validate_json(path.read_bytes())
    first = next(piece for piece in made.pieces if piece.path.startswith(ROWS))
    path.write_text(made.model_copy(update={"pieces": tuple(p for p in made.pieces if p != first)}).model_dump_json())


def renamed(path: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        document = json.loads((folder / keys.MANIFEST).read_text())
        first = next(one for one in document["pieces"] if one["path"].startswith(ROWS))
        first["path"] = ROWS + path
        (folder / keys.MANIFEST).write_text(json.dumps(document))

    return write


HARMS: dict[str, Callable[[Path], Any]] = {
    "a bit of the rows": lambda folder: flip(piece(ROWS)(folder)),
    "a bit of the index": lambda folder: flip(piece(INDEX)(folder)),
    "a bit of the note": lambda folder: flip(piece(NOTE)(folder)),
    "a piece is torn": lambda folder: piece(ROWS)(folder).write_bytes(b"torn"),
    "a piece is longer": lambda folder: piece(ROWS)(folder).open("ab").write(b"more"),
    "a piece is absent": lambda folder: piece(ROWS)(folder).unlink(),
    "a piece is left out": swapped,
    "a piece's path has an empty part": renamed("//a"),
    "a piece's path leaves its file": renamed("/../x"),
    "a piece's path has a NUL": renamed("/\0"),
    "its manifest is torn": lambda folder: (folder / keys.MANIFEST).write_bytes(b'{"job"'),
    "another identity": manifest(identity="f" * 64),
    "another job's": manifest(job="job2"),
    "of other data": manifest(data_sha256="0" * 64),
    "of a newer trainer": manifest(version=2),
    "not committed": lambda folder: (folder / keys.MANIFEST).unlink(),
}
SILENT = ("another job's", "of other data", "of a newer trainer", "not committed")


@pytest.mark.parametrize("harm", HARMS)
async def test_an_incomplete_or_foreign_token_cache_is_ignored(token_store: TokenStore, harm: str) -> None:
    folder = token_store.path(await token_store.sent(1)).parent
    HARMS[harm](folder)
    token_store.told.clear()
    identity, machine = await token_store.fetched(2)
    assert identity == ""
    assert [path.name for path in machine.iterdir()] == ["snapshots"], "nothing of it is left"
    told = [line for line in token_store.told if "cannot be used" in line]
    assert len(told) == (harm not in SILENT), token_store.told


async def test_an_older_token_cache_replaces_a_damaged_newest_one(token_store: TokenStore) -> None:
    await token_store.sent(1)
    flip(piece(ROWS)(token_store.path(await token_store.sent(2)).parent))
    assert (await token_store.fetched(3))[0] == IDENTITY
    assert any("/a2/" in line and "cannot be used" in line for line in token_store.told)
    assert any("attempt 1" in line for line in token_store.told)


async def test_restarted_agent_replaces_bad_files_by_good_ones(token_store: TokenStore) -> None:
    """The store has a damaged token cache from the agent's first start."""
    bad = await token_store.sent(1)
    flip(piece(ROWS)(token_store.path(bad).parent))
    await token_store.sender(1, token_store.tokenised(1)).run()
    (good,) = await token_store.manifests()
    assert good != bad
    assert (await token_store.fetched(2))[0] == IDENTITY


async def test_checkpoints_come_first_and_what_is_to_end_sends_nothing(
    token_store: TokenStore, some_looks: SomeLooks
) -> None:
    run = token_store.tokenised(1)
    snapshot = run.snapshots / "0000000001-000001"
    snapshot.mkdir()
    sender = token_store.sender(1, run)
    sending = asyncio.create_task(sender.run())
    await some_looks(sending)
    assert await token_store.keys() == []
    token_store.state.end(Outcome.DRAINED, "test")
    snapshot.rmdir()
    await some_looks(sending)
    assert await token_store.keys() == []
    token_store.state.ending = None
    await sending
    assert len(await token_store.manifests()) == 1


class Failing:
    """Store whose writes fail after a number of writes."""

    def __init__(self, objects: Objects, good: int, *, times: int) -> None:
        self._write, self._good, self._times = objects.write, good, times

    async def __call__(self, key: str, data: bytes) -> None:
        self._good -= 1
        if self._good < 0 and self._times > 0:
            self._times -= 1
            raise ObjectStoreError(f"cannot write {key}: no room (os error 28)")
        await self._write(key, data)


async def test_a_store_that_fails_for_a_while_gets_the_rest(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sent = token_store.tokenised(1), token_store.objects.sent_bytes
    monkeypatch.setattr(token_store.objects, "write", Failing(token_store.objects, 2, times=rows.TRIES - 1))
    await token_store.sender(1, run).run()
    assert (await token_store.fetched(2))[0] == IDENTITY
    manifest = len(token_store.path((await token_store.manifests())[0]).read_bytes())
    size = sum((run.root / name).stat().st_size for name in rows.FILES)
    assert token_store.objects.sent_bytes - sent == size + manifest, "nothing twice"


async def test_a_store_that_is_full_is_reported_and_left_as_it_was(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store.objects, "write", Failing(token_store.objects, 2, times=10**6))
    await token_store.sender(1, token_store.tokenised(1)).run()
    assert await token_store.keys() == []
    (told,) = token_store.told
    assert "stay on this machine" in told
    assert "no room" in told


async def test_an_interrupted_token_cache_upload_resumes(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback ended the worker and started another one."""
    sender, whole = token_store.sender(1, token_store.tokenised(1)), asyncio.Event()
    write = token_store.objects.write

    async def stalls(key: str, data: bytes) -> None:
        await write(key, data)
        if len(await token_store.keys()) == 3:
            whole.set()
            await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(token_store.objects, "write", stalls)
        sending = asyncio.create_task(sender.run())
        await whole.wait()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
    assert await token_store.manifests() == []
    await sender.run()
    assert (await token_store.fetched(2))[0] == IDENTITY


@pytest.mark.parametrize(
    ("free", "most", "why"),
    [(10**12, 100, "no more than 100 bytes are worth"), (10_000, MB, "the store has space for 10.0 kB")],
)
async def test_a_token_cache_over_the_limit_is_not_uploaded(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch, free: int, most: int, why: str
) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    await token_store.sender(1, token_store.tokenised(1), token_cache_bytes=most).run()
    (told,) = token_store.told
    assert why in told
    assert await token_store.keys() == []


async def test_a_store_s_folder_that_is_gone_does_not_end_the_training(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: str) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(shutil, "disk_usage", stale)
    await token_store.sender(1, token_store.tokenised(1)).run()
    (told,) = token_store.told
    assert "Stale file handle" in told
    assert await token_store.keys() == []


@pytest.mark.parametrize("who", [{"node": 1}, {"token_cache_bytes": 0}])
async def test_only_the_first_machine_uploads_and_only_if_worthwhile(
    token_store: TokenStore, who: dict[str, Any]
) -> None:
    await token_store.sender(1, token_store.tokenised(1), **who).run()
    assert await token_store.keys() == []


@pytest.mark.parametrize("call", ["keys", "read", "download"])
async def test_a_store_that_is_away_for_a_moment_is_asked_again(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    await token_store.sent(1)
    real, sleep, asked = getattr(token_store.objects, call), asyncio.sleep, 0

    async def down_twice(*what: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise ObjectStoreError("timed out")
        return await real(*what, **more)

    monkeypatch.setattr(rows, "RETRY_FOR_S", 3600.0)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))
    monkeypatch.setattr(token_store.objects, call, down_twice)
    assert (await token_store.fetched(2))[0] == IDENTITY
    assert asked > 2


async def test_a_store_that_cannot_be_read_costs_no_more_than_the_work(
    token_store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await token_store.sent(1)

    async def down(key: str, path: Path, **what: Any) -> None:
        raise ObjectStoreError(f"cannot download {key}: timed out")

    monkeypatch.setattr(token_store.objects, "download", down)
    identity, folder = await token_store.fetched(2)
    assert (identity, [path.name for path in folder.iterdir()]) == ("", ["snapshots"])
    assert "not used: cannot download" in token_store.told[-1]


# ------------------------------------------------------------------------------------------------------- real machines

PLANTED = "planted: this row was never read"


def plant(bench: Bench, key: str) -> None:
    """Plant a bad row in the notes of a token cache. An attempt that fetches the cache reports it; an attempt that
    reads the rows does not.
    """
    folder, made = bench.path(key).parent, TokenCacheManifest.model_validate_json(bench.path(key).read_bytes())
    (piece,) = [one for one in made.pieces if one.path.startswith(NOTE)]
    path = folder / "files" / piece.path
    path.write_text(json.dumps({**json.loads(path.read_text()), "bad": 1, "faults": [PLANTED]}))
    content = path.read_bytes()
    changed = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    pieces = tuple(one.model_copy(update=changed) if one == piece else one for one in made.pieces)
    bench.put(key, made.model_copy(update={"pieces": pieces}))


def found(bench: Bench, attempt: str) -> list[str]:
    root = bench.path("")
    below = bench.path(keys.checkpoints(JOB)) / attempt
    return [*keys.token_cache_manifests(path.relative_to(root).as_posix() for path in below.rglob(keys.MANIFEST))]


def trains(agent: Agent) -> bool:
    return agent.process.poll() is not None or bool(agent.beat and agent.beat.phase == "training")


def test_second_attempt_reuses_tokens_until_an_input_changes(bench: Bench, tmp_path: Path) -> None:
    """The rows depend on data, task, lengths, columns and tokenizer."""
    kind = KINDS["causal_lm lora"]
    fields = tiny_jobs.train(kind, tmp_path / "model").model_dump()
    fields |= {"max_steps": 1_000_000, "eval_every_steps": None, "samples": {}}
    fields["data"] |= {"bad_share": 0.5}
    data = bench.data(tiny_jobs.data(kind), kind.format)

    def started(**changes: Any) -> Agent:
        return bench.start(train=TrainConfig.model_validate(fields | changes), data=data, token_cache_bytes=MB)

    first = started()
    (key,) = until(lambda: found(bench, first.attempt), "rows in the store")
    until(lambda: trains(first), "a training")
    first.desire("drain")
    assert first.wait().outcome is Outcome.DRAINED, first.log
    plant(bench, key)

    second = started()
    until(lambda: trains(second), "a training")
    second.desire("drain")
    assert second.wait().outcome is Outcome.DRAINED, second.log
    assert f"1 of {tiny_jobs.ROWS} rows are bad and left out; the first: {PLANTED}" in second.log
    assert "the tokenised rows of attempt 1 are fetched" in second.log
    assert second.final.resumed_from == first.final.step
    assert not found(bench, second.attempt)

    third = started(max_length=24)
    assert until(lambda: found(bench, third.attempt), "rows of another length in the store") != [key]
    until(lambda: trains(third), "a training")
    third.desire("stop")
    third.wait()
    assert PLANTED not in third.log
