"""`gpubroker submit` until the job is durable: check, quote, cap and confirmation."""

import tarfile
from asyncio import to_thread
from decimal import Decimal
from io import BytesIO

import pytest

from broker.cli.core.exit_codes import Exit
from broker.cli.core.output import Output
from broker.domain.job import Job
from broker.domain.money import format_usd
from broker.domain.policy import Policy
from broker.ports import JobFilter
from tests.cli.conftest import GOOD, Shell
from trainer.contract import object_keys as keys


async def only_job(shell: Shell) -> Job:
    (job,) = await shell.api.service.store.jobs(JobFilter())
    return job


async def test_submit_shows_check_and_quote_and_makes_the_job(shell: Shell) -> None:
    ran = await to_thread(shell.run, "submit", shell.spec(), "--yes", "--detach")
    assert ran.code == 0, ran.err
    job = await only_job(shell)
    assert job.cap_usd == Decimal(5)
    assert job.id in ran.out
    assert "40: " in ran.out  # rows
    assert "word, definition" in ran.out
    assert "Define word0:" in ran.out
    assert "what word 0 means to a cynic" in ran.out
    assert "(simulated)" in ran.out
    assert "$ to finish" in ran.out


async def test_set_changes_the_job_by_yaml_types(shell: Shell) -> None:
    settings = ("train.epochs=2", "labels.team=blue", "retry.on=[preempted]", "train.method.r=4", "cap_usd=2.5")
    words = [word for s in settings for word in ("--set", s)]
    ran = await to_thread(shell.run, "submit", shell.spec(), "-y", "-d", *words)
    assert ran.code == 0, ran.err
    spec = (await only_job(shell)).spec
    assert spec.train is not None
    assert (spec.train.epochs, spec.labels, spec.retry.on) == (2, {"team": "blue"}, ("preempted",))
    assert spec.train.method.kind == "lora"
    assert spec.train.method.r == 4
    assert spec.cap_usd == Decimal("2.5")


@pytest.mark.parametrize(("duration", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200)])
async def test_a_failed_jobs_machine_is_kept_for_keep_on_failure(shell: Shell, duration: str, seconds: int) -> None:
    words = ("--set", "keep_on_failure=1", "--keep-on-failure", duration)
    ran = await to_thread(shell.run, "submit", shell.spec(), "-y", "-d", *words)
    assert ran.code == 0, ran.err
    assert (await only_job(shell)).spec.keep_on_failure == seconds


async def test_several_machines_are_shown_with_the_price_of_all(shell: Shell) -> None:
    path = shell.spec(GOOD + "resources: {nodes: 2}\n")
    (line, *_) = (await to_thread(shell.run, "quote", path, "--json")).document["lines"]
    assert line["nodes"] == 2
    ran = await to_thread(shell.run, "quote", path)
    shown = " ".join(ran.out.replace("│", " ").split())
    assert f"2 nodes of {line['offer']['accelerator']}" in shown
    assert format_usd(Decimal(line["offer"]["usd_per_hour"]) * 2) in shown


async def test_cap_is_proposed_where_the_spec_has_none(shell: Shell) -> None:
    path = shell.spec(GOOD.replace("cap_usd: 5\n", ""))
    quoted = await to_thread(shell.run, "quote", path, "--json")
    ran = await to_thread(shell.run, "submit", path, "--json", "--detach")
    assert ran.code == 0, ran.err
    job = await only_job(shell)
    assert job.cap_usd == max(Decimal(quoted.document["proposed_cap_usd"]), Decimal("0.01"))
    assert ran.document["id"] == job.id
    assert "cap: $" in ran.err


async def test_an_unconfirmed_submit_creates_no_job(shell: Shell) -> None:
    ran = await to_thread(shell.run, "submit", shell.spec(), "--detach", stdin="n\n")
    assert ran.code == 2
    assert "pass -y" in ran.err
    assert not await shell.api.service.store.jobs(JobFilter())


async def test_idempotency_key_makes_one_job(shell: Shell) -> None:
    words = ("submit", shell.spec(), "-y", "-d", "--json", "--idempotency-key", "once")
    first, second = await to_thread(shell.run, *words), await to_thread(shell.run, *words)
    assert first.document["id"] == second.document["id"]
    other = await to_thread(shell.run, *words, "--set", "train.epochs=3")
    assert other.code == 2
    assert (await only_job(shell)).id == first.document["id"]


async def test_script_folder_is_packed(shell: Shell) -> None:
    code = shell.folder / "code"
    code.mkdir()
    (code / "main.py").write_text("print('hello')\n")
    text = "name: hello\ncap_usd: 5\nscript:\n  code: code\n  command: [python, main.py]\n"
    ran = await to_thread(shell.run, "submit", shell.spec(text, None), "-y", "-d", "--json")
    assert ran.code == 0, ran.err
    (blob,) = [b for b in await shell.api.service.blobs.list(keys.JOB_DATA) if ran.document["id"] in b.key]
    data = await shell.api.service.blobs.get(blob.key)
    assert data is not None
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        assert tar.getnames() == ["main.py"]


async def test_a_missing_requirements_file_is_named_before_the_upload(shell: Shell) -> None:
    (shell.folder / "code").mkdir()
    (shell.folder / "code" / "main.py").write_text("print('hello')\n")
    text = "name: a\ncap_usd: 5\nscript:\n  code: code\n  command: [python, main.py]\n  requirements: needs.txt\n"
    ran = await to_thread(shell.run, "submit", shell.spec(text, None), "-y", "-d")
    assert ran.code == Exit.BAD_INPUT
    assert "job.yaml:6: script.requirements: code has no file needs.txt; its path is relative to script.code" in ran.err
    assert not [b for b in await shell.api.service.blobs.list("") if b.key.startswith("uploads")]


async def test_quote_creates_nothing(shell: Shell) -> None:
    ran = await to_thread(shell.run, "quote", shell.spec())
    assert ran.code == 0
    assert not await shell.api.service.store.jobs(JobFilter())


@pytest.mark.parametrize(
    ("rules", "message", "hold"),
    [
        (
            {"approval_above_usd": "2"},
            "approval: a job submitted now waits for approval: policy limits",
            "approval",
        ),
        (
            {"budgets": [{"limit_usd": "3", "per": "day"}]},
            "policy: a job submitted now waits for policy limits",
            "wait",
        ),
    ],
)
async def test_a_quote_says_what_a_policy_would_do(
    shell: Shell, rules: dict[str, object], message: str, hold: str
) -> None:
    await shell.api.service.store.put_policy(Policy.model_validate({"name": "limits", "team": "default", **rules}))
    ran = await to_thread(shell.run, "quote", shell.spec())
    assert ran.code == 0
    assert message in " ".join(ran.out.split())
    document = (await to_thread(shell.run, "quote", shell.spec(), "--json")).document
    assert (document["held"]["hold"], document["held"]["policy"]) == (hold, "limits")


async def test_dropped_offers_are_grouped_with_a_reason(shell: Shell) -> None:
    ran = await to_thread(shell.run, "quote", shell.spec(GOOD + "resources: {spot: never}\n"))
    assert ran.code == 0
    assert "excluded by the spot policy" in ran.out


@pytest.mark.parametrize(
    ("answer", "code", "count"), [("n\n", Exit.REFUSED, 0), ("\n", Exit.REFUSED, 0), ("y\n", Exit.OK, 1)]
)
async def test_the_answer_decides_if_a_job_is_submitted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, answer: str, code: Exit, count: int
) -> None:
    monkeypatch.setattr(Output, "is_interactive", True)
    ran = await to_thread(shell.run, "submit", shell.spec(), "--detach", stdin=answer)
    assert ran.code == code
    assert "It never spends more than $5.0000" in ran.out
    assert len(await shell.api.service.store.jobs(JobFilter())) == count


async def test_the_cap_is_asked_for_and_the_proposal_is_its_default(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "is_interactive", True)
    path = shell.spec(GOOD.replace("cap_usd: 5\n", ""))
    ran = await to_thread(shell.run, "submit", path, "--detach", stdin="much\n-1\n$2.5\ny\n")
    assert ran.code == 0, ran.err
    assert (await only_job(shell)).cap_usd == Decimal("2.5")


async def test_a_key_refuses_a_deadline_that_changes_at_each_repeat(shell: Shell) -> None:
    path = shell.spec(GOOD + "deadline: 6h\n")
    ran = await to_thread(shell.run, "submit", path, "-y", "-d", "--idempotency-key", "once")
    assert (ran.code, "job.yaml:9: deadline: a time from now" in ran.err) == (Exit.BAD_INPUT, True)
    assert (await to_thread(shell.run, "submit", path, "-y", "-d")).code == 0
    words = ("submit", path, "-y", "-d", "--json", "--set", "deadline=2099-01-31T12:00Z", "--idempotency-key", "once")
    first, again = await to_thread(shell.run, *words), await to_thread(shell.run, *words)
    assert first.document["id"] == again.document["id"]
