"""The command line imports what a command needs, and says what is missing."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.core.exit_codes import Exit, not_installed
from broker.cli.core.lazy_commands import Entry
from broker.cli.main import COMMANDS, SYNONYMS, Commands, app

SHELLS = ("serve", "ssh", "exec")
"""Commands whose output is not a document."""


def functions(entry: Entry) -> Mapping[str, str]:
    return {"": entry.target} if isinstance(entry.target, str) else entry.target


def loaded(target: str) -> Any:
    return Commands(name="gpubroker")._function(target)


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_the_docstring_of_the_command(name: str) -> None:
    for member, target in functions(COMMANDS[name]).items():
        function = loaded(target)
        assert function.__doc__, target
        if not member:
            assert " ".join(function.__doc__.split()) == COMMANDS[name].summary


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SHELLS])
def test_every_command_writes_json(name: str) -> None:
    for target in functions(COMMANDS[name]).values():
        assert "as_json" in loaded(target).__wrapped__.__annotations__, target


def imported_by(*words: str) -> set[str]:
    """Return modules that a command has imported in a new process when it ends."""
    program = (
        "import sys, json, io, contextlib\n"
        "from broker.cli.main import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        f"    try: app({list(words)!r})\n"
        "    except SystemExit as e: assert e.code == 0, e.code\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout))


def test_help_imports_no_command() -> None:
    modules = imported_by("--help")
    assert not {m for m in modules if m.startswith(("broker.cli.jobs", "broker.cli.commands", "broker.client"))}
    assert not modules & {"aiohttp", "pydantic", "asyncio", "broker.domain.spec"}


def test_estimate_imports_no_client() -> None:
    modules = imported_by("estimate", "HuggingFaceTB/SmolLM2-135M", "--gpu", "L40S")
    assert not modules & {"aiohttp", "broker.client.async_client", "broker.api.schemas.jobs", "broker.daemon"}


def test_list_of_jobs_imports_no_spec() -> None:
    modules = imported_by("ls", "--help")
    assert not modules & {"broker.domain.spec", "broker.api.schemas.jobs", "broker.daemon", "rich.progress"}


@pytest.mark.parametrize("words", [["serve"], ["sweep", "--json"], ["key", "adopt"]])
def test_a_missing_package_is_one_line_with_the_fix(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Commands, target: str) -> Any:
        raise ModuleNotFoundError("No module named 'asyncpg'", name="asyncpg.pool")

    monkeypatch.setattr(Commands, "_function", refuse)
    ran = CliRunner().invoke(app, words)
    message = (
        "this command needs the packages of the daemon (asyncpg is missing); run `pip install 'gpubroker[server]'`"
    )
    assert ran.stderr == f"error: {message}\n"
    assert ran.exit_code == Exit.BAD_INPUT
    if "--json" in words:
        assert json.loads(ran.stdout)["error"]["message"] == message


@pytest.mark.parametrize("module", ["broker.nowhere", "providers", "trainer.gone"])
def test_a_missing_module_of_our_own_is_a_fault(module: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        not_installed(ModuleNotFoundError("gone", name=module))


@pytest.mark.parametrize("word", SYNONYMS)
def test_words_of_similar_programs_name_an_existing_command(word: str) -> None:
    assert word not in COMMANDS
    named = re.findall(r"gpubroker ([\w-]+)", SYNONYMS[word])
    assert named
    assert all(name.startswith("--") or name in COMMANDS for name in named)
    ran = CliRunner().invoke(app, [word])
    assert (ran.exit_code, f"No such command '{word}'; use" in " ".join(ran.output.split())) == (2, True)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("token", "create"), "token new"), (("token", "list"), "token ls"), (("token", "revoke"), "token rm"),
        (("team", "add"), "team new"), (("secret", "create"), "secret set"), (("secret", "delete"), "secret rm"),
        (("policy", "list"), "policy ls"),
    ],
)  # fmt: skip
def test_a_group_suggests_its_member_for_the_same_action(words: tuple[str, ...], command: str) -> None:
    ran = CliRunner().invoke(app, list(words))
    assert ran.exit_code == 2
    assert f"No such command '{words[1]}'; use `" in " ".join(ran.output.replace("│", " ").split())
    assert f" {command}`" in " ".join(ran.output.replace("│", " ").split())
