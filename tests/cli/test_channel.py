"""`gpubroker channel` and `gpubroker notify`."""

from asyncio import to_thread

import pytest

from broker.cli.core.exit_codes import Exit
from tests.cli.conftest import Shell
from tests.unit.broker.notify.harness import always, receiving


async def test_a_webhook_is_added_listed_tested_and_removed(shell: Shell) -> None:
    async with receiving(always(204)) as receiver:
        url = f"url=http://127.0.0.1:{receiver.port}/in?token=hush\n"
        ran = await to_thread(
            shell.run, "channel", "add", "webhook", "ci", "--event", "job.*", "--event", "attempt.preempted", stdin=url
        )
        assert (ran.code, ran.err) == (0, "")
        assert "whsec_" in ran.out
        listed = await to_thread(shell.run, "channel", "ls")
        assert f"127.0.0.1:{receiver.port}" in listed.out
        assert "job.*, attempt.preempted" in listed.out
        for words in (("channel", "test", "ci"), ("notify", "test")):
            ran = await to_thread(shell.run, *words)
            assert ran.code == 0, ran.out
            assert "ci: delivered in" in ran.out
        assert len(receiver.got) == 2
        shown = await to_thread(shell.run, "channel", "show", "ci")
        assert "state    ok" in shown.out
        assert "hush" not in listed.out + shown.out + ran.out
    ran = await to_thread(shell.run, "notify", "test", "ci", "--json")
    assert ran.code == Exit.JOB_FAILED
    assert [(one["channel"], one["delivered"]) for one in ran.document] == [("ci", False)]
    assert (await to_thread(shell.run, "channel", "remove", "ci")).code == 0
    ran = await to_thread(shell.run, "channel", "show", "ci")
    assert ran.code == Exit.NOT_FOUND
    assert "channel ls" in ran.err


async def test_a_channel_is_disabled_filtered_and_rotated(shell: Shell) -> None:
    await to_thread(shell.run, "channel", "add", "webhook", "ci", stdin="url=https://hooks.example.com/x\n")
    ran = await to_thread(shell.run, "channel", "disable", "ci")
    assert "is disabled" in ran.out
    listed = await to_thread(shell.run, "channel", "ls", "--json")
    (one,) = [one for one in listed.document["items"] if one["name"] == "ci"]
    assert (one["enabled"], one["reason"][:11]) == (False, "disabled by")
    assert "is enabled" in (await to_thread(shell.run, "channel", "enable", one["id"])).out
    ran = await to_thread(shell.run, "channel", "events", "ci", "--event", "job.failed")
    assert "receives job.failed" in ran.out
    assert "receives all events" in (await to_thread(shell.run, "channel", "events", "ci")).out
    assert "whsec_" in (await to_thread(shell.run, "channel", "rotate", "ci")).out


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (("pigeon", "x"), "url=https://h.example/", "use one of webhook, slack"),
        (("webhook", "x"), "https://h.example/hush", "not of the form NAME=VALUE"),
        (("webhook", "x"), "url=http://h.example/hush", "is not https"),
        (("webhook", "x"), "", "secrets.url"),
        (("webhook", "No Name"), "url=https://h.example/hush", "NAME: must be 1 to 63 of a-z, 0-9 and -"),
        (("webhook", "x", "--event", "job*"), "url=https://h.example/hush", "--event: must be a kind of event, for"),
    ],
)
async def test_a_bad_channel_is_exit_2_and_names_the_place(
    shell: Shell, words: tuple[str, ...], stdin: str, message: str
) -> None:
    ran = await to_thread(shell.run, "channel", "add", *words, stdin=stdin)
    assert ran.code == Exit.BAD_INPUT
    assert message in ran.err
    assert "hush" not in ran.err + ran.out


async def test_a_name_that_two_teams_use_needs_an_id(shell: Shell) -> None:
    await shell.api.service.store.put_team("red", "")
    for team in ("default", "red"):
        ran = await to_thread(
            shell.run, "channel", "add", "webhook", "ci", "--team", team, stdin="url=https://hooks.example.com/x\n"
        )
        assert ran.code == 0, ran.err
    ran = await to_thread(shell.run, "channel", "show", "ci")
    assert ran.code == Exit.BAD_INPUT
    assert "give the id" in ran.err
