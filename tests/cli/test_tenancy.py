"""Teams, tokens and the audit from the command line."""

from asyncio import to_thread
from datetime import UTC, datetime, timedelta

import pytest

from broker.cli.core.exit_codes import Exit
from tests.cli.conftest import Shell


async def test_secrets_shown_once_are_never_logged(shell: Shell) -> None:
    for words in (
        ("token", "new", "mia"),
        ("channel", "add", "webhook", "ci"),
        ("channel", "rotate", "ci"),
    ):
        ran = await to_thread(shell.run, *words, "--json", stdin="url=http://127.0.0.1:9/\n")
        secret = ran.document.get("token") or ran.document["secret"]
        assert (len(secret) > 40, secret in ran.err) == (True, False)
    shown = await to_thread(shell.run, "token", "new", "mia")
    assert "gb_" in shown.out


async def test_a_team_gets_a_token_that_ends(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await to_thread(shell.run, "team", "new", "red")).code == 0
    assert (await to_thread(shell.run, "team", "new", "red")).code != 0
    assert (await to_thread(shell.run, "team", "new", "No Name")).code == Exit.BAD_INPUT
    new = ("token", "new", "mia", "--team", "red", "--scope", "manage", "--scope", "read", "--expires")
    document = (await to_thread(shell.run, *new, "30d", "--json")).document
    left = datetime.fromisoformat(document["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
    assert document["team"] == "red"
    for wrong in ("soon", "2027-01-31T12:00:00", "3y"):
        ran = await to_thread(shell.run, *new, wrong)
        assert (ran.code, "not a time; write it as 2h, 7d" in ran.err) == (Exit.BAD_INPUT, True)
    with monkeypatch.context() as mias:
        mias.setenv("GPUBROKER_TOKEN", document["token"])
        assert [t["name"] for t in (await to_thread(shell.run, "team", "ls", "--json")).document["items"]] == ["red"]
        listed = (await to_thread(shell.run, "token", "ls", "--json")).document["items"]
        assert [t["id"] for t in listed] == [document["id"]]
        assert (await to_thread(shell.run, "team", "new", "blue")).code == Exit.UNAUTHORISED
    assert (await to_thread(shell.run, "team", "rm", "red")).code == 0
    assert (await to_thread(shell.run, "team", "rm", "red")).code == Exit.NOT_FOUND


WRONG = [
    (("team", "new", "A B"), 'NAME: must be 1 to 63 of a-z, 0-9 and -, with no - at an end, not "A B"'),
    (
        ("token", "new", "bob", "--scope", "foo"),
        "--scope: must be 'read', 'submit', 'manage', 'metrics' or 'admin', not \"foo\"",
    ),
    (
        ("token", "new", "bob", "--team", "A B"),
        '--team: must be 1 to 63 of a-z, 0-9 and -, with no - at an end, not "A B"',
    ),
    (("token", "rm", "nope"), 'token_id: must be the id of a token, which `gpubroker token ls` shows, not "nope"'),
    (
        ("secret", "set", "1bad"),
        'name: must be 1 to 128 letters, digits and _, with no digit at the beginning, not "1bad"',
    ),
    (("slack", "link", "ada", "--owner", "ada"), 'USER: must be a member ID, as U012ABCDEF, not "ada"'),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
async def test_a_wrong_name_is_reported_in_words(shell: Shell, words: tuple[str, ...], message: str) -> None:
    ran = await to_thread(shell.run, *words, stdin="value")
    assert (ran.code, ran.err) == (Exit.BAD_INPUT, f"error: {message}\n")


async def test_the_audit_names_actor_and_action(shell: Shell) -> None:
    assert (await to_thread(shell.run, "secret", "set", "HF_TOKEN", stdin="hf_verysecret")).code == 0
    shown = await to_thread(shell.run, "audit", "--action", "secret", "--json")
    (entry,) = shown.document["items"]
    assert (entry["action"], entry["target"], entry["before"]) == ("secret.set", "HF_TOKEN", None)
    table = await to_thread(shell.run, "audit", "--target", "HF_TOKEN")
    assert "secret.set" in table.out
    assert "hf_verysecret" not in shown.out + table.out
    assert (await to_thread(shell.run, "audit", "--since", "yesterday")).code == Exit.BAD_INPUT


async def test_last_means_the_callers_own_newest_job(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = (await to_thread(shell.run, "submit", shell.spec(), "-y", "-d", "--json")).document["id"]
    assert "owner" not in (await to_thread(shell.run, "ls")).out
    document = (await to_thread(shell.run, "token", "new", "bob", "--json")).document
    with monkeypatch.context() as bobs:
        bobs.setenv("GPUBROKER_TOKEN", document["token"])
        assert "you have no job yet" in (await to_thread(shell.run, "get", "last")).err
        theirs = (await to_thread(shell.run, "submit", shell.spec(), "-y", "-d", "--json")).document["id"]
        assert (await to_thread(shell.run, "get", "last", "--json")).document["id"] == theirs
    assert (await to_thread(shell.run, "get", "last", "--json")).document["id"] == mine
    listed = await to_thread(shell.run, "ls")
    assert "default bob" in listed.out
    only = (await to_thread(shell.run, "ls", "--owner", "bob", "--json")).document["items"]
    assert [job["id"] for job in only] == [theirs]
