"""Short forms in a spec: one meaning in YAML, in JSON, with `--set` and in the Python client."""

import json
import subprocess
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest

from broker.cli.core.exit_codes import BadInput
from broker.cli.spec.spec_file import load
from broker.client.async_client import AsyncClient
from broker.client.spec_shorthand import full_form
from tests.api.harness import CSV, MODEL
from tests.cli.conftest import Shell

SCRIPT: dict[str, Any] = {"name": "a", "cap_usd": "1", "script": {"code": ".", "command": ["python", "a.py"]}}
TRAIN: dict[str, Any] = {
    "name": "a", "cap_usd": "1",
    "train": {"model": MODEL, "data": {"path": "a.csv", "completion": "{definition}"}, "method": {"kind": "lora"}},
}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    "one GPU": (SCRIPT, "resources.accelerators", "H100", ("h100",)),
    "one provider": (SCRIPT, "resources.providers", "vast", ("vast",)),
    "one cause": (SCRIPT, "retry.on", "preempted", ("preempted",)),
    "one subnet": (SCRIPT, "resources.aws.subnets", "public", ("public",)),
    "one target": (TRAIN, "train.method.targets", "q_proj", ("q_proj",)),
    "a known word": (TRAIN, "train.method.targets", "attention", "attention"),
    "a line": (SCRIPT, "script.command", "python3 t.py --name 'a b'", ("python3", "t.py", "--name", "a b")),
    "numbers in a command": (SCRIPT, "script.command", ["a", 3, 0.5], ("a", "3", "0.5")),
    "a number": (SCRIPT, "env.EPOCHS", 3, "3"),
    "a boolean": (SCRIPT, "env.DEBUG", True, "true"),
    "a label": (SCRIPT, "labels.run", 7, "7"),
    "a column": (TRAIN, "train.data.prompt", {"word": None}, "{word}"),
}
"""Spec, setting, its short form, and the value that is meant."""


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(spec))
    here, (*above, last) = copy, path.split(".")
    for key in above:
        here = here.setdefault(key, {})
    here[last] = value
    return copy


def at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


def written(value: Any) -> str:
    return "{word}" if value == {"word": None} else value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("name", FORMS)
def test_a_short_form_means_the_same_everywhere(name: str, tmp_path: Path) -> None:
    spec, path, short, meant = FORMS[name]
    file = tmp_path / "job.json"
    file.write_text(json.dumps(changed(spec, path, short)))
    assert at(load(file).spec, path) == meant
    file.write_text(json.dumps(spec))
    assert at(load(file, (f"{path}={written(short)}",)).spec, path) == meant
    full = at(full_form(changed(spec, path, short)), path)
    assert (tuple(full) if isinstance(full, list) else full) in (meant, (short,))


async def test_the_python_client_sends_the_full_form(shell: Shell) -> None:
    async with AsyncClient.found() as client:
        upload = await client.upload(CSV.encode(), name="words.csv")
        train = {"model": MODEL, "data": {"path": upload.ref, "completion": {"definition": None}}}
        spec = {
            "name": "a",
            "cap_usd": "1",
            "train": train,
            "env": {"EPOCHS": 3},
            "resources": {"accelerators": "H100"},
        }
        quote = await client.quote(spec)
        job = await client.job((await client.submit(spec, key="k")).id)
    assert quote.lines
    assert (job.spec.env, job.spec.resources.accelerators) == ({"EPOCHS": "3"}, ("h100",))


def test_a_number_keeps_the_digits_of_the_file_and_of_the_option(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nscript: {code: ., command: [a, 1.10]}\nenv: {VERSION: 1.10, A: 1.10, B: True}\n")
    env = {"VERSION": "1.10", "A": "2.50", "B": "True"}
    spec = load(file, ("env.A=2.50",)).spec
    assert spec.script is not None
    assert (spec.env, spec.script.command) == (env, ("a", "1.10"))
    assert load(file, ("env={A: 2}",)).spec.env == {"A": "2"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("script.command", "python a.py | tee log"),
        ("script.command", "python a.py; ls"),
        ("script.command", "python $HOME/a.py"),
        ("script.command", "python 'a.py"),
        ("script.command", {"a": 1}),
        ("resources.accelerators", {"H100": 8}),
        ("env.A", [1]),
        ("env", 3),
    ],
)
async def test_what_has_no_single_meaning_is_refused(shell: Shell, path: str, value: Any) -> None:
    file = shell.folder / "job.json"
    file.write_text(json.dumps(changed(SCRIPT, path, value)))
    with pytest.raises(BadInput, match="^[^\n]*" + path):
        await to_thread(load, file)


FOR_A_SHELL = (
    "python prepare.py\npython train.py\n", "python a.py \\\n  --lr 1", 'python a.py "a \\\nb"', "A=1 python t.py",
    "A='x y' python t.py", "python t.py # all", "cd src", "'cd' src", "exit 1", "ls *.json", "ls a?", "ls ~/x",
    "ls {a,b}.json", "echo `date`", 'echo "`date`"', 'echo "$A"', "echo $A", "a & b", "a && b", "a < b", "a > b",
    "ls [ab]", "a | b", "a; b", "(a)", "! a", "python 'a.py", "python a\\", "",
)  # fmt: skip
WITHOUT_A_SHELL = {
    "python t.py\n": ["python", "t.py"],
    "python -c 'import a\nprint(1 < 2)'": ["python", "-c", "import a\nprint(1 < 2)"],
    "ls '*.json' \"{a,b}\" \\~/x 'a#b' a=1": ["ls", "*.json", "{a,b}", "~/x", "a#b", "a=1"],
    'echo \'it costs $1\' "a\'b|c" "a \\" b"': ["echo", "it costs $1", "a'b|c", 'a " b'],
}


@pytest.mark.parametrize("line", FOR_A_SHELL)
async def test_a_line_for_a_shell_is_refused_with_the_fix(shell: Shell, line: str) -> None:
    file = shell.folder / "job.json"
    file.write_text(json.dumps(changed(SCRIPT, "script.command", line)))
    with pytest.raises(BadInput, match=r"^[^\n]*script.command: [^\n]*write \[bash, -c, \"…\"\][^\n]*$"):
        await to_thread(load, file)


@pytest.mark.parametrize("line", WITHOUT_A_SHELL)
def test_a_quoted_character_has_no_meaning_to_a_shell(tmp_path: Path, line: str) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(changed(SCRIPT, "script.command", line)))
    words = WITHOUT_A_SHELL[line]
    assert at(load(file).spec, "script.command") == tuple(words)
    bash = subprocess.run(
        ["bash", "-c", f"command() {{ printf '%s\\0' \"$@\"; }}; command {line}"], capture_output=True
    )
    assert bash.stdout.decode().split("\0")[:-1] == words
