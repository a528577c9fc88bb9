"""Commands on existing jobs, with one JSON document and the exit codes that scripts rely on."""

import json
from asyncio import to_thread
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
import yaml

from broker.cli.commands import secrets as admin
from broker.cli.commands import tenancy
from broker.cli.core.exit_codes import Exit
from broker.cli.jobs import jobs, submit
from broker.cli.main import AREAS
from broker.cli.operator import daemon
from broker.client.transport import connection
from broker.domain.ids import JobId, attempt_id
from broker.domain.job import Event, JobState
from broker.ports import Change
from broker.quote.decision_record import packed
from tests.cli.conftest import GOOD, Shell, invoke
from tests.conformance.samples import admission
from tests.support.machines import offer, quoted
from trainer.contract import object_keys


async def submitted(shell: Shell, text: str = GOOD) -> JobId:
    ran = await to_thread(shell.run, "submit", shell.spec(text), "-y", "-d", "--json")
    assert ran.code == 0, ran.err
    return JobId(ran.document["id"])


async def end(shell: Shell, job: JobId, state: JobState) -> None:
    """End a queued job as the placement controller would."""
    store = shell.api.service.store
    claimed = await store.claim_jobs([JobState.QUEUED], owner="test", lease_s=0, limit=100)
    row = next(j for j in claimed if j.id == job)
    rests = None if state is JobState.CAPPED else datetime.now(UTC)
    after = replace(row, state=state, reason="because of a test", finished_at=rests)
    event = Event(job_id=job, kind=f"job.{state}", message="it ended")
    assert await store.apply([Change(job=(row, after), events=(event,))]) == [True]


async def test_ls_filters_by_label_and_state(shell: Shell) -> None:
    blue = await submitted(shell, GOOD + "labels: {team: blue}\n")
    red = await submitted(shell, GOOD + "labels: {team: red}\n")
    ran = await to_thread(shell.run, "ls", "--label", "team=blue", "--json")
    assert [j["id"] for j in ran.document["items"]] == [blue]
    ran = await to_thread(shell.run, "ls", "--state", "active", "--json")
    assert ran.document["items"] == []
    ran = await to_thread(shell.run, "ls")
    assert blue in ran.out
    assert red in ran.out


async def test_a_job_is_found_by_id_start_name_and_last(shell: Shell) -> None:
    job = await submitted(shell)
    for reference in (job, job[:6], "cynic", "last"):
        ran = await to_thread(shell.run, "get", reference, "--json")
        assert ran.document["id"] == job
    again = await submitted(shell)
    ran = await to_thread(shell.run, "get", "cynic")
    assert ran.code == Exit.BAD_INPUT
    assert job in ran.err
    assert again in ran.err


async def test_a_name_means_the_live_job_and_otherwise_the_newest(shell: Shell) -> None:
    old = await submitted(shell)
    await end(shell, old, JobState.FAILED)
    live = await submitted(shell)
    last = await submitted(shell)
    await end(shell, last, JobState.CAPPED)
    assert (await to_thread(shell.run, "get", "cynic", "--json")).document["id"] == live
    await end(shell, live, JobState.SUCCEEDED)
    assert (await to_thread(shell.run, "get", "cynic", "--json")).document["id"] == last


async def test_ls_shows_active_jobs_and_every_form(shell: Shell) -> None:
    ended, live = await submitted(shell), await submitted(shell)
    await end(shell, ended, JobState.FAILED)
    ran = await to_thread(shell.run, "ls", "--active", "-o", "yaml")
    assert [job["id"] for job in yaml.safe_load(ran.out)["items"]] == [live]
    assert (await to_thread(shell.run, "ls", "-o", "json")).document["items"][1]["id"] == ended
    wide = await to_thread(shell.run, "ls", "-o", "wide")
    assert "attempts" in wide.out.splitlines()[0]
    assert (await to_thread(shell.run, "ls", "--active", "--state", "failed")).code == Exit.BAD_INPUT
    assert (await to_thread(shell.run, "ls", "-o", "csv")).code == Exit.BAD_INPUT


async def test_ls_shows_gpu_and_cloud_of_the_latest_attempt(shell: Shell) -> None:
    await submitted(shell)
    store = shell.api.service.store
    (row,) = await store.claim_jobs([JobState.QUEUED], owner="test", lease_s=60, limit=1)
    assert await store.apply([admission(row)]) == [True]
    ran = await to_thread(shell.run, "ls", "--json")
    (job,) = ran.document["items"]
    detail = (await to_thread(shell.run, "get", "last", "--json")).document
    assert job["machine"] == detail["machine"]
    assert job["machine"]["accelerator"] == detail["runs"][0]["offer"]["accelerator"]
    assert job["machine"]["accelerator"] in (await to_thread(shell.run, "ls")).out


async def test_nothing_and_a_letter_mean_no_job(shell: Shell) -> None:
    job = await submitted(shell)
    ran = await to_thread(shell.run, "cancel", "")
    assert ran.code == Exit.BAD_INPUT
    assert "JOB is empty; give a job id, its first characters, a name, or last" in ran.err
    ran = await to_thread(shell.run, "cancel", job[:3])
    assert ran.code == Exit.NOT_FOUND
    assert "a prefix of an id has at least 4 characters" in ran.err
    ran = await to_thread(shell.run, "get", job[:4], "--json")
    assert ran.document["stop_requested"] is False


@pytest.mark.parametrize("command", ["get", "cancel", "events", "logs", "artifacts", "watch", "retry"])
async def test_unknown_job_is_exit_3(shell: Shell, command: str) -> None:
    for reference in ("a" * 13, "nobody"):
        ran = await to_thread(shell.run, command, reference, "--json")
        assert ran.code == Exit.NOT_FOUND
        assert ran.document["error"]["kind"] == "not_found"


async def test_hints_name_only_absent_settings(shell: Shell) -> None:
    job = await submitted(shell)
    ran = await to_thread(shell.run, "get", "a" * 13)
    assert ran.err == f"error: no job {'a' * 13}; `gpubroker ls` lists yours\n"
    ran = await to_thread(shell.run, "logs", job, "--attempt", "99")
    assert (ran.code, ran.err) == (Exit.NOT_FOUND, f"error: job {job} has no attempt 99; it has 0\n")
    await end(shell, job, JobState.FAILED)
    assert (await to_thread(shell.run, "rm", job, "--data", "-y")).code == 0
    ran = await to_thread(shell.run, "logs", job)
    assert (ran.code, "were deleted" in ran.err, "gpubroker ls" in ran.err) == (Exit.NOT_FOUND, True, False)
    ran = await to_thread(shell.run, "token", "rm", "a" * 8)
    assert "`gpubroker token ls` lists them" in ran.err


async def test_explain_says_why_an_attempt_was_bought(shell: Shell) -> None:
    job = await submitted(shell)
    ran = await to_thread(shell.run, "explain", job)
    assert (ran.code, "has no attempt yet" in ran.err) == (3, True)
    made = quoted([offer(id="cheap"), offer(id="dear", usd_per_hour=Decimal(20))], resources={"max_usd_per_hour": "10"})
    store = shell.api.service.store
    (row,) = await store.claim_jobs([JobState.QUEUED], owner="test", lease_s=60, limit=1)
    assert await store.apply([replace(admission(row), decision=packed(made))]) == [True]
    ran = await to_thread(shell.run, "explain", "last")
    assert "cheap" in ran.out
    assert "hourly_limit" in ran.out
    ran = await to_thread(shell.run, "explain", job, "--limit", "1")
    assert ("dear" in ran.out, "1 more offers; --limit 2 shows all" in ran.out) == (False, True)
    ran = await to_thread(shell.run, "explain", job, "--attempt", "1", "--json")
    assert [one["offer"] for one in ran.document["items"]] == ["cheap", "dear"]


async def test_explain_says_why_a_job_waits_moves_or_stays(shell: Shell) -> None:
    job = await submitted(shell)
    store = shell.api.service.store
    (row,) = await store.claim_jobs([JobState.QUEUED], owner="test", lease_s=60, limit=1)
    waits = Event(job_id=row.id, kind="job.waiting", message="waits for spot until 16:24Z, then buys on demand")
    assert await store.apply([Change(job=(row, row), events=(waits,))]) == [True]
    ran = await to_thread(shell.run, "explain", job)
    assert (ran.code, "waits for spot until 16:24Z" in ran.out) == (0, True)
    (row,) = await store.claim_jobs([JobState.QUEUED], owner="test", lease_s=60, limit=1)
    moves = Event(job_id=row.id, kind="attempt.moves", message="attempt 1 moves to spot in us, saves $1")
    stays = Event(job_id=row.id, kind="attempt.stays", message="attempt 1 stays on demand: no spot offer is on sale")
    change = replace(admission(row), decision=packed(quoted([offer(id="cheap")])), events=(stays, moves))
    assert await store.apply([change]) == [True]
    ran = await to_thread(shell.run, "explain", job)
    lines = ran.out.splitlines()
    texts = ("waits for", "stays on", "saves $1", "cheap")
    places = [next(n for n, line in enumerate(lines) if text in line) for text in texts]
    assert places == sorted(places)


async def test_cancel_is_idempotent(shell: Shell) -> None:
    job = await submitted(shell)
    for _ in range(2):
        ran = await to_thread(shell.run, "cancel", job, "--json")
        assert ran.code == 0
        assert ran.document["stop_requested"] is True


async def test_watch_ends_with_the_job_and_its_exit_code(shell: Shell) -> None:
    codes = {JobState.SUCCEEDED: Exit.OK, JobState.FAILED: Exit.JOB_FAILED, JobState.CAPPED: Exit.CAPPED}
    for state, code in codes.items():
        job = await submitted(shell)
        await end(shell, job, state)
        ran = await to_thread(shell.run, "watch", job)
        assert ran.code == code
        assert "job.submitted" in ran.out
        assert f"job.{state}" in ran.out
        assert f"cynic ({job}) {state.value}" in ran.out


async def test_watch_json_is_one_summary(shell: Shell) -> None:
    job = await submitted(shell)
    await end(shell, job, JobState.SUCCEEDED)
    ran = await to_thread(shell.run, "get", job, "--watch", "--json")
    assert ran.document["job"] == job
    assert ran.document["state"] == "succeeded"
    assert ran.document["usd"] == "0"
    assert "job.succeeded" in ran.err


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED, JobState.CAPPED])
@pytest.mark.parametrize("words", [("watch",), ("get", "--watch")])
async def test_a_job_that_did_not_succeed_is_one_document(
    shell: Shell, words: tuple[str, ...], state: JobState
) -> None:
    job = await submitted(shell)
    await end(shell, job, state)
    ran = await to_thread(shell.run, *words, job, "--json")
    assert ran.code == (Exit.CAPPED if state is JobState.CAPPED else Exit.JOB_FAILED)
    assert ran.document["state"] == state.value
    assert f"error: job {job} " in ran.err
    assert "because of a test" in ran.err


async def test_events_and_logs_are_printed(shell: Shell) -> None:
    job = await submitted(shell)
    ran = await to_thread(shell.run, "events", job, "--json")
    assert [e["kind"] for e in ran.document["items"]] == ["job.submitted"]
    await end(shell, job, JobState.FAILED)
    ran = await to_thread(shell.run, "events", job, "--follow", "--json")
    assert [json.loads(line)["seq"] for line in ran.out.splitlines()] == [1, 2]
    ran = await to_thread(shell.run, "logs", job, "--json")
    assert ran.document["text"] == ""
    ran = await to_thread(shell.run, "logs", job)
    assert (ran.out, f"job {job} never ran, so it has no log; its state is failed" in ran.err) == ("", True)
    assert (await to_thread(shell.run, "logs", job, "--follow", "--tail", "1")).code == Exit.BAD_INPUT


async def test_the_end_of_a_log_with_times(shell: Shell) -> None:
    job = await submitted(shell)
    store = shell.api.service.store
    (row,) = await store.claim_jobs([JobState.QUEUED], owner="test", lease_s=60, limit=1)
    change = admission(row)
    assert await store.apply([change]) == [True]
    assert "has uploaded no log yet" in (await to_thread(shell.run, "logs", job)).err
    attempt = attempt_id(row.id, 1)
    await shell.api.service.blobs.put(object_keys.log_chunk(attempt, 0, "boot", 0), b"a\nb\nc\n")
    assert (await to_thread(shell.run, "logs", job, "--tail", "2")).out == "b\nc\n"
    lines = (await to_thread(shell.run, "logs", job, "--timestamps", "--since", "1h")).out.splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["a", "b", "c"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(lines[0].partition(" ")[0])) < timedelta(hours=1)
    ran = await to_thread(shell.run, "logs", job, "--since", "2999-01-01")
    assert (ran.out, "uploaded nothing in that time" in ran.err) == ("", True)


async def test_a_cap_can_be_raised_and_not_lowered(shell: Shell) -> None:
    job = await submitted(shell)
    ran = await to_thread(shell.run, "cap", job, "7.5", "--json")
    assert ran.document["cap_usd"] == "7.500000"
    for amount in ("1", "abc", "-3", "nan"):
        ran = await to_thread(shell.run, "cap", job, "--", amount)
        assert ran.code == Exit.BAD_INPUT


async def test_retry_makes_a_linked_job(shell: Shell) -> None:
    job = await submitted(shell)
    ran = await to_thread(shell.run, "retry", job)
    assert ran.code == Exit.BAD_INPUT  # it has not ended
    await end(shell, job, JobState.FAILED)
    ran = await to_thread(shell.run, "retry", job, "--json")
    assert ran.document["retry_of"] == job


async def test_an_ended_job_cannot_be_refused(shell: Shell) -> None:
    job = await submitted(shell)
    await end(shell, job, JobState.CANCELLED)
    ran = await to_thread(shell.run, "refuse", job)
    assert (ran.code, f"job {job} is cancelled; there is nothing to refuse" in ran.err) == (Exit.BAD_INPUT, True)


async def test_clone_writes_a_spec_that_can_be_submitted(shell: Shell) -> None:
    job = await submitted(shell, GOOD + "labels: {team: red}\n")
    target = shell.folder / "again.yaml"
    ran = await to_thread(shell.run, "clone", job, str(target))
    assert ran.code == 0, ran.err
    assert (await to_thread(shell.run, "clone", job, str(target))).code == Exit.BAD_INPUT
    again = await to_thread(shell.run, "submit", str(target), "-y", "-d", "--json")
    assert again.code == 0, again.err
    specs = [(await to_thread(shell.run, "get", one, "--json")).document["spec"] for one in (job, again.document["id"])]
    assert specs[0] == specs[1]
    shown = await to_thread(shell.run, "clone", job)
    assert yaml.safe_load(shown.out) == yaml.safe_load(target.read_text())


@pytest.mark.parametrize(
    ("word", "use"),
    [("status", "gpubroker ls`"), ("stop", "gpubroker cancel JOB`"), ("down", "gpubroker cancel JOB`"),
     ("delete", "gpubroker rm JOB --data`"), ("version", "gpubroker --version`"), ("jobs", "gpubroker ls`")],
)  # fmt: skip
def test_words_of_other_programs_name_the_command(word: str, use: str) -> None:
    ran = invoke(word)
    assert (ran.code, use in " ".join(ran.err.replace("│", " ").split())) == (Exit.BAD_INPUT, True)


def test_help_is_grouped_and_names_no_type_of_a_flag() -> None:
    shown = invoke("--help").out
    places = [shown.index(area) for area in AREAS]
    assert places == sorted(places)
    assert "<bool>" not in shown + invoke("logs", "--help").out + invoke("policy", "--help").out


async def test_secrets_are_never_shown(shell: Shell) -> None:
    value = "hf_very-confidential"
    ran = await to_thread(shell.run, "secret", "set", "HF_TOKEN", stdin=f"{value}\n")
    assert ran.code == 0
    ran = await to_thread(shell.run, "secret", "ls", "--json")
    assert ran.document == {"names": ["HF_TOKEN"]}
    job = await submitted(shell, GOOD + "secrets: [HF_TOKEN]\n")
    ran = await to_thread(shell.run, "get", job, "--json")
    assert value not in ran.out + ran.err
    assert (await to_thread(shell.run, "secret", "rm", "HF_TOKEN")).code == 0
    assert (await to_thread(shell.run, "secret", "rm", "HF_TOKEN")).code == Exit.NOT_FOUND
    ran = await to_thread(shell.run, "secret", "set", "NOT-A-NAME", stdin="x")
    assert ran.code == Exit.BAD_INPUT
    for wrong in ("", b"\xff\xfe"):
        ran = await to_thread(shell.run, "secret", "set", "WRONG", stdin=wrong)
        assert ran.code == Exit.BAD_INPUT
        assert "the value of WRONG" in ran.err


async def test_tokens_are_created_listed_and_revoked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (await to_thread(shell.run, "token", "new", "bob", "--scope", "read", "--json")).document
    assert document["scopes"] == ["read"]
    listed = await to_thread(shell.run, "token", "ls", "--json")
    assert document["token"] not in listed.out
    assert document["id"] in listed.out
    assert (await to_thread(shell.run, "token", "new", "bob", "--scope", "all")).code == Exit.BAD_INPUT
    with monkeypatch.context() as bobs:
        bobs.setenv("GPUBROKER_TOKEN", document["token"])
        assert (await to_thread(shell.run, "ls")).code == 0
        ran = await to_thread(shell.run, "submit", shell.spec(), "-y", "-d")
        assert ran.code == Exit.UNAUTHORISED
        assert "scope" in ran.err
    assert (await to_thread(shell.run, "token", "rm", document["id"])).code == 0
    monkeypatch.setenv("GPUBROKER_TOKEN", document["token"])
    assert (await to_thread(shell.run, "ls")).code == Exit.UNAUTHORISED


async def test_login_takes_the_token_of_the_environment_and_stores_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUBROKER_URL")
    connection.login_file().mkdir(parents=True)
    ran = await to_thread(shell.run, "login", shell.api.url)
    assert ran.code == Exit.BAD_INPUT
    assert f"{connection.login_file()} cannot be written (Is a directory); " in ran.err
    connection.login_file().rmdir()
    assert (await to_thread(shell.run, "login", shell.api.url)).code == 0
    monkeypatch.delenv("GPUBROKER_TOKEN")
    ran = await to_thread(shell.run, "login", "--json")
    assert ran.document["owner"] == "ada"


async def test_offers_say_that_they_are_simulated(shell: Shell) -> None:
    ran = await to_thread(shell.run, "offers")
    assert "(simulated)" in ran.out
    ran = await to_thread(shell.run, "offers", "--json")
    prices = [float(o["usd_per_hour"]) for o in ran.document["items"]]
    assert prices == sorted(prices)
    assert prices


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "FOO"), "--gpu FOO: not known; known are h100-sxm"),
        (("--gpu", "rtx4090,l40z"), "--gpu l40z: not known, the nearest is "),
        (("--provider", "simulatd"), "--provider: unknown provider 'simulatd'; did you mean simulated?"),
        (("--provider", "foo"), "configured are simulated"),
    ],
)
async def test_offers_with_unknown_hardware_are_refused(shell: Shell, words: tuple[str, ...], message: str) -> None:
    ran = await to_thread(shell.run, "offers", *words, "--json")
    assert ran.code == Exit.BAD_INPUT
    assert message in ran.document["error"]["message"]


async def test_known_gpus_without_offers_are_not_an_error(shell: Shell) -> None:
    ran = await to_thread(shell.run, "offers", "--gpu", "b200", "--provider", "simulated")
    assert (ran.code, "no offers" in ran.out) == (0, True)


async def test_an_empty_list_of_jobs_says_why(shell: Shell) -> None:
    assert "`gpubroker submit SPEC.yaml` submits one" in (await to_thread(shell.run, "ls")).out
    await submitted(shell)
    ran = await to_thread(shell.run, "ls", "--label", "a=b")
    assert "no job matches; `gpubroker ls` alone lists the newest jobs" in ran.out
    assert "submit" not in ran.out


async def test_doctor_names_each_problem_with_a_fix(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = await to_thread(shell.run, "doctor", "--json")
    assert ran.code == 0
    assert {c["name"] for c in ran.document["checks"]} >= {
        "daemon",
        "database",
        "blobs",
        "broker",
        "token",
        "simulated",
    }
    monkeypatch.setenv("GPUBROKER_URL", "http://127.0.0.1:9")
    ran = await to_thread(shell.run, "doctor")
    assert ran.code == Exit.JOB_FAILED
    assert "PROBLEM  daemon: no daemon answers at http://127.0.0.1:9" in ran.out
    assert "gpubroker serve" in ran.out


async def test_doctor_names_the_failing_parts_of_an_unready_daemon(shell: Shell) -> None:
    await shell.api.service.blobs.delete(object_keys.BROKER_LEASE)
    ran = await to_thread(shell.run, "doctor")
    assert ran.code == Exit.JOB_FAILED
    assert "PROBLEM  broker: no broker has ever held the lease" in ran.out


def test_every_command_has_help_and_json() -> None:
    for module in (admin, daemon, jobs, submit, tenancy):
        for name, action in vars(module).items():
            if (
                getattr(action, "__wrapped__", None) is not None
                and action.__module__ == module.__name__
                and name != "serve"
            ):
                assert action.__doc__
                assert "as_json" in action.__wrapped__.__annotations__, name
