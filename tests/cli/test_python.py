"""Python API: a blocking client, and a fine-tune as one call, against the real application."""

import asyncio
import inspect
import threading
from asyncio import to_thread
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

import broker
from broker.api.schemas.job_list import JobView
from broker.api.schemas.jobs import EventView
from broker.cli.core.exit_codes import Exit
from broker.client import job_names
from broker.client.async_client import AsyncClient
from broker.client.fit import Fitted
from broker.client.sync_client import Client
from broker.client.transport.errors import ApiError, DaemonUnreachable, NotFinished
from broker.domain.ids import JobId
from broker.domain.job import Event, Job, JobState, jobs_meant
from broker.ports import Change, JobFilter
from tests.api.harness import CSV, MODEL, Running
from tests.api.test_files import admitted, put_checkpoint
from tests.cli.conftest import Shell

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)
METRICS = b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n'
NOT_TWINNED = {"found", "shell", "url", "asynchronous", "wait", "close"}
"""Constructors and plumbing; a terminal's WebSocket is for the command line."""


def test_every_call_has_a_blocking_twin_of_the_same_signature() -> None:
    def public(of: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(of) if not name.startswith("_")} - NOT_TWINNED

    assert public(Client) == public(AsyncClient)
    for name in public(AsyncClient):
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name)), name


def test_the_package_exports_the_clients() -> None:
    assert (broker.Client, broker.AsyncClient) == (Client, AsyncClient)
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = broker.Clint  # type: ignore[attr-defined]


async def test_a_blocking_client_submits_follows_and_raises(shell: Shell) -> None:
    api = shell.api

    def use() -> list[str]:
        with Client() as client:
            upload = client.upload(CSV.encode(), name="words.csv")
            spec = {
                "name": "cynic", "cap_usd": "5",
                "train": {"model": MODEL, "data": {"path": upload.ref, "completion": "{definition}"}},
            }  # fmt: skip
            job = client.submit(spec, key="k")
            assert client.submit(spec, key="k").id == job.id
            with pytest.raises(ApiError, match="cap_usd"):
                client.raise_cap(job.id, Decimal(1))
            kinds = []
            for event in client.events(job.id):
                kinds.append(event.kind)
                if event.kind == "job.submitted":
                    assert client.cancel(job.id).stop_requested
            return kinds

    running = asyncio.create_task(to_thread(use))
    while not (await waiting(api)).stop_requested:
        await api.service.store.wait("jobs", 0.1)
    await end(api, JobState.CANCELLED, "because of a test")
    assert await running == ["job.submitted", "job.stop_requested", "job.cancelled"]


async def test_a_client_of_nothing_says_so(own_home: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="none was ever started"):
        Client()
    with pytest.raises(DaemonUnreachable):
        Client("http://127.0.0.1:1").me()


async def test_a_client_needs_no_with_and_takes_names(shell: Shell) -> None:
    def use() -> None:
        client = Client()
        upload = client.upload(CSV.encode(), name="words.csv")
        train = {"model": MODEL, "data": {"path": upload.ref, "completion": "{definition}"}}
        spec = {"name": "cynic", "cap_usd": "5", "train": train}
        first = client.submit(spec, key="a")
        assert client.job("cynic").id == first.id
        client.cancel("cynic")
        assert client.events_now("cynic").items[0].kind == "job.submitted"
        with pytest.raises(ApiError, match="no job"):
            client.job("cynical")
        second = client.submit(spec, key="b")
        assert [job.id for job in client.jobs().items] == [second.id, first.id]
        with pytest.raises(ApiError, match="'cynic' matches 2 jobs"):
            client.cancel("cynic")
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match="is closed"):
            client.jobs()

    await to_thread(use)


async def test_a_name_never_means_another_owners_job_next_to_ones_own(shell: Shell) -> None:
    def submit(headers: dict[str, str], key: str, name: str = "train") -> str:
        with Client(shell.api.url, headers["Authorization"].removeprefix("Bearer ")) as client:
            upload = client.upload(CSV.encode(), name="words.csv")
            train = {"model": MODEL, "data": {"path": upload.ref, "completion": "{definition}"}}
            return client.submit({"name": name, "cap_usd": "5", "train": train}, key=key).id

    own = await to_thread(submit, await shell.api.token("ada", "read", "submit"), "own")
    await end(shell.api, JobState.FAILED, "because of a test")
    mate = await to_thread(submit, await shell.api.token("bob", "read", "submit"), "mate")
    long = await to_thread(submit, await shell.api.token("ada", "read", "submit"), "long", "finetunellama")
    with_command = await to_thread(shell.run, "cancel", "train")
    assert (with_command.code, "'train' matches 2 jobs" in with_command.err) == (Exit.BAD_INPUT, True)
    assert {job for job in (own, mate) if job in with_command.err} == {own, mate}
    for words in (("cap", "train", "9"), ("retry", "train"), ("rm", "train", "--data", "-y")):
        refused = await to_thread(shell.run, *words)
        assert (refused.code, mate in refused.err) == (Exit.BAD_INPUT, True), words
    assert (await to_thread(shell.run, "get", "train", "--json")).document["id"] == own
    assert (await to_thread(shell.run, "get", "finetunellama", "--json")).document["id"] == long

    def use() -> None:
        with Client() as client:
            assert client.job("train").id == client.job_id("train") == own
            assert client.job("finetunellama").id == long
            with pytest.raises(ApiError, match="'train' matches 2 jobs"):
                client.cancel("train")
            with pytest.raises(ApiError, match="no job"):
                client.job("a" * 13)

    await to_thread(use)
    assert not (await to_thread(shell.run, "get", mate, "--json")).document["stop_requested"]


def job_view(number: int, state: str, owner: str = "ada") -> JobView:
    return JobView(
        id=JobId(f"job{number}"), name="a", team="t", owner=owner, state=JobState(state), reason="", labels={},
        created_at=NOON, finished_at=None, cap_usd=Decimal(1), spent_usd=Decimal(0), attempts=0, retries_used=0,
        stop_requested=False, retry_of=None,
    )  # fmt: skip


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("succeeded", "queued", "capped"), [1]),
        (("failed", "succeeded"), [0]),
        (("queued", "failed", "active"), [0, 2]),
    ],
)
def test_a_name_means_ones_live_job_otherwise_the_newest(
    states: tuple[str, ...], expected: list[int], writes: bool
) -> None:
    jobs = [job_view(n, state) for n, state in enumerate(states)]
    assert [job.id for job in jobs_meant(jobs, "t", "ada", writes=writes)] == [f"job{n}" for n in expected]


def test_another_owners_job_is_meant_only_if_no_other_job_has_the_name() -> None:
    own, other = job_view(0, "failed"), job_view(1, "active", "bob")
    for team, owner in (("t", "eve"), ("other team", "ada")):
        assert jobs_meant([other], team, owner, writes=True) == [other]
        assert jobs_meant([own, other], team, owner, writes=False) == [own, other]
    assert jobs_meant([own, other], "t", "ada", writes=True) == [own, other]
    assert jobs_meant([own, other], "t", "ada", writes=False) == [own]


async def test_an_old_live_job_is_meant_before_newer_ended_ones(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_names, "SEARCHED_JOBS", 1)
    with_client = Client()
    kept = await to_thread(with_client.upload, CSV.encode(), name="words.csv")
    train = {"model": MODEL, "data": {"path": kept.ref, "completion": "{definition}"}}
    spec = {"name": "cynic", "cap_usd": "5", "train": train}
    ended = await to_thread(with_client.submit, spec, key="ended")
    await end(shell.api, JobState.FAILED, "because of a test")
    live = await to_thread(with_client.submit, spec, key="live")
    store = shell.api.service.store
    before = await store.job(ended.id)
    assert before is not None
    newest = replace(
        before, id=JobId("z" * 13), state=JobState.FAILED, created_at=before.created_at + timedelta(days=1)
    )
    await store.submit(replace(newest, finished_at=newest.created_at), key=None, body_sha256="", events=[])
    assert await to_thread(with_client.job_id, "cynic") == live.id
    await to_thread(with_client.close)


async def test_an_unreferenced_client_ends_its_thread(shell: Shell) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "gpubroker-client"}

    def use() -> set[threading.Thread]:
        client = Client()
        client.me()
        return threads()

    (thread,) = await to_thread(use)
    await to_thread(thread.join)


async def test_fit_works_in_a_running_event_loop_and_shows_progress(shell: Shell) -> None:
    """A notebook calls it inside its own loop. Progress is called in the caller's thread, which a notebook shows."""
    seen = list[tuple[str, int]]()

    def notebook() -> None:
        async def cell() -> None:
            def progress(event: EventView) -> None:
                seen.append((event.kind, threading.get_ident()))

            broker.fit(model=MODEL, data=[{"completion": f"x{n}"} for n in range(40)], cap_usd=2, progress=progress)

        here = threading.get_ident()
        with pytest.raises(NotFinished, match="is failed: no luck"):
            asyncio.run(cell())
        assert {ident for _, ident in seen} == {here}

    running = asyncio.create_task(to_thread(notebook))
    await waiting(shell.api)
    await end(shell.api, JobState.FAILED, "no luck")
    await running
    assert [kind for kind, _ in seen] == ["job.submitted", "job.failed"]


async def test_an_error_of_progress_ends_fit_in_a_running_loop(shell: Shell) -> None:
    def progress(event: EventView) -> None:
        raise LookupError(event.kind)

    def notebook() -> None:
        async def cell() -> None:
            broker.fit(model=MODEL, data=[{"completion": f"x{n}"} for n in range(40)], cap_usd=2, progress=progress)

        asyncio.run(cell())

    with pytest.raises(LookupError, match=r"job\.submitted"):
        await to_thread(notebook)


async def waiting(api: Running) -> Job:
    """Return the job that `fit` has submitted."""
    while True:
        jobs = await api.service.store.jobs(JobFilter())
        if jobs:
            return jobs[0]
        await api.service.store.wait("jobs", 0.1)


async def end(api: Running, state: JobState, reason: str) -> None:
    """End the only queued job as the placement controller would."""
    (row,) = await api.service.store.claim_jobs([JobState.QUEUED], owner="t", lease_s=60, limit=1)
    rests = None if state is JobState.CAPPED else api.service.clock.now()
    after = replace(row, state=state, reason=reason, finished_at=rests)
    event = Event(job_id=row.id, kind=f"job.{state.value}", message=reason)
    assert await api.service.store.apply([Change(job=(row, after), events=(event,))]) == [True]


async def test_fit_waits_reports_and_fetches(shell: Shell) -> None:
    api, events = shell.api, list[EventView]()
    rows = ({"prompt": f"word {n}", "completion": f"what it means, {n}"} for n in range(40))

    def use() -> Fitted:
        return broker.fit(
            model=MODEL, data=rows, cap_usd="2.50", to=shell.folder / "out", progress=events.append,
            train={"max_steps": 7}, spec={"labels": {"team": "blue"}},
        )  # fmt: skip

    running = asyncio.create_task(to_thread(use))
    job = await waiting(api)
    assert job.spec.train is not None
    assert (job.cap_usd, job.spec.train.max_steps, job.spec.labels) == (Decimal("2.50"), 7, {"team": "blue"})
    assert (job.spec.train.data.prompt, job.spec.train.data.completion) == ("{prompt}", "{completion}")
    attempt = await admitted(api, job.id)
    await put_checkpoint(
        api, job.id, attempt, 7, {"adapter/model.safetensors": b"w", "metrics.jsonl": METRICS, "rng.json": b"{}"},
        complete=True,
    )  # fmt: skip
    active = await api.service.store.job(job.id)
    assert active is not None
    done = replace(active, state=JobState.SUCCEEDED, finished_at=api.service.clock.now())
    event = Event(job_id=job.id, kind="job.succeeded", message="it ended")
    assert await api.service.store.apply([Change(job=(active, done), events=(event,))]) == [True]
    fitted = await running
    assert fitted.job.id == job.id
    assert {str(f.relative_to(fitted.folder)) for f in fitted.files} == {"adapter/model.safetensors", "metrics.jsonl"}
    assert fitted.losses == ((1, 3.0), (2, 2.5))
    assert fitted.usd == 0
    assert events[0].kind == "job.submitted"
    assert events[-1].kind == "job.succeeded"


async def test_fit_raises_what_became_of_the_job(shell: Shell) -> None:
    file = shell.folder / "words.csv"
    file.write_text(CSV)

    def use() -> None:
        broker.fit(model=MODEL, data=file, cap_usd=2, completion="{definition}", progress=None)

    running = asyncio.create_task(to_thread(use))
    job = await waiting(shell.api)
    await end(shell.api, JobState.FAILED, "no luck")
    with pytest.raises(NotFinished, match="is failed: no luck") as raised:
        await running
    assert raised.value.job.id == job.id


async def test_fit_with_a_key_waits_for_the_first_calls_job(shell: Shell) -> None:
    async def use() -> None:
        await broker.afit(
            model=MODEL,
            data=[{"a": f"x{n}"} for n in range(40)],
            cap_usd=2,
            completion="{a}",
            key="once",
            progress=None,
        )

    both = asyncio.gather(use(), use(), return_exceptions=True)
    job = await waiting(shell.api)
    await end(shell.api, JobState.CAPPED, "too dear")
    assert [str(e) for e in await both] == [
        f"job {job.id} is capped: too dear; `gpubroker cap {job.id} USD` lets it resume"
    ] * 2
    assert len(await shell.api.service.store.jobs(JobFilter())) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"completion": "{nothing}"}, "nothing"),
        ({"completion": "{a}", "train": {"epoch": 2}}, "did you mean epochs"),
        ({"completion": "{a}", "spec": {"resources": {"gpus": 64}}}, "ever sells a machine with 64 GPUs"),
    ],
)
async def test_fit_refuses_what_the_api_refuses(shell: Shell, given: dict[str, object], message: str) -> None:
    shell.api.market.lists_all = True
    rows = [{"a": f"x{n}"} for n in range(40)]
    with pytest.raises(ApiError, match=message):
        await broker.afit(model=MODEL, data=rows, cap_usd=2, progress=None, **given)  # type: ignore[arg-type]
    assert await shell.api.service.store.jobs(JobFilter()) == []


def test_fit_is_afit_for_programs_without_an_event_loop() -> None:
    assert inspect.signature(broker.fit) == inspect.signature(broker.afit)
    assert (broker.fit.__name__, broker.fit.__doc__) == ("fit", broker.afit.__doc__)
    assert not inspect.iscoroutinefunction(broker.fit)
    with pytest.raises(TypeError, match="moddel"):
        broker.fit(moddel=MODEL, data=[], cap_usd=2)  # type: ignore[call-arg] # which mypy says as well


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"word": "x", "meaning": "y"}], {}, "rows.jsonl has the columns word, meaning and no column completion"),
        ([{"prompt": "x", "text": "y"}], {"completion": ""}, r'say what is to be learned, e\.g\. completion="{text}"$'),
    ],
)
async def test_fit_asks_for_what_is_to_be_learned(
    shell: Shell, rows: list[dict[str, str]], more: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match="^completion: .*" + message) as raised:
        await broker.afit(model=MODEL, data=rows * 40, cap_usd=2, progress=None, **more)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert await shell.api.service.store.jobs(JobFilter()) == []


async def test_fit_keeps_the_other_data_settings(shell: Shell) -> None:
    data = {"completion": "{a}", "eval_share": 0.5}
    waits = broker.afit(model=MODEL, data=[{"a": f"x{n}"} for n in range(40)], cap_usd=2, train={"data": data})
    running = asyncio.create_task(waits)
    job = await waiting(shell.api)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert job.spec.train is not None
    assert (job.spec.train.data.completion, job.spec.train.data.eval_share) == ("{a}", 0.5)


@pytest.mark.parametrize("amount", ["two", "1e40"])
async def test_fit_says_what_is_no_amount(shell: Shell, amount: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of dollars"):
        await broker.afit(model=MODEL, data=[{"a": "b"}], cap_usd=amount, completion="{a}")


async def test_fit_refuses_a_float_for_money(shell: Shell) -> None:
    with pytest.raises(TypeError, match="money from a float"):
        await broker.afit(model=MODEL, data=[{"a": "b"}], cap_usd=2.5, completion="{a}")  # type: ignore[arg-type]
