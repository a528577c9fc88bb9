"""The check of the texts by `make lint`: it refuses what the writing rules refuse, and no correct text."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

Check = Callable[[str, str], list[str]]
LONG = "The broker destroys " + "the first and " * 8 + "the last machine."


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    monkeypatch.syspath_prepend(".ci")
    monkeypatch.delitem(sys.modules, "prose", raising=False)
    prose = import_module("prose")

    def run(name: str, source: str) -> list[str]:
        path = tmp_path / name
        path.write_text(source)
        return [message for text in prose.texts(path) for message in prose.findings(text)]

    return run


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('def f():\n    """What the broker does."""\n', "begins with 'What'"),
        ('LIMIT = 3\n"""Of machines."""\n', "begins with 'Of'"),
        ('LIMIT = 3\n"""Its seconds."""\n', "begins with 'Its'"),
        ("# The daemon told the agent.\n", "has 'told'"),
        ('raise ValueError("the home is full; make room there")\n', "has 'room'"),
        ('raise ValueError(f"{home} is full; make room there")\n', "has 'room'"),
        (f'"""{LONG}"""\n', "has a sentence of 30 words"),
        ("# " + LONG.replace(" and the ", "\n# and the ", 1) + "\n", "has a sentence of 30 words"),
        ('"""The machine that a broker which owns it destroys, whose job is done."""\n', "with 3 relative pronouns"),
    ],
)
def test_a_text_of_a_module_is_refused(check: Check, source: str, finding: str) -> None:
    (message,) = check("module.py", source)
    assert finding in message


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        (LONG, "has a sentence of 30 words"),
        ("- " + LONG.replace(" and the ", "\n  and the ", 1) + "\n", "has a sentence of 30 words"),
        (f"| key | {LONG} |\n", "has a sentence of 30 words"),
        ("**Rule.** The page stands alone.\n", "has 'stands'"),
    ],
)
def test_a_text_of_a_page_is_refused(check: Check, source: str, finding: str) -> None:
    (message,) = check("page.md", source)
    assert finding in message


@pytest.mark.parametrize(
    ("name", "source", "finding"),
    [
        ("0001_initial.sql", "-- The broker told the team.\nSELECT 1;\n", "has 'told'"),
        ("0001_initial.sql", f"    state text, -- {LONG}\n", "has a sentence of 30 words"),
        ("pyproject.toml", "# " + LONG.replace(" and the ", "\n# and the ", 1) + "\n", "has a sentence of 30 words"),
        ("start.sh", 'run "$1" # Nobody waits.\n', "has 'Nobody'"),
        ("Makefile", "test: venv ## the tests of a house\n", "has 'house'"),
    ],
)
def test_a_comment_that_ends_with_its_line_is_refused(check: Check, name: str, source: str, finding: str) -> None:
    (message,) = check(name, source)
    assert finding in message


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core.sql", "-- name: told\nSELECT 'house', told FROM room;\n"),
        ("core.sql", f"-- {LONG[:90]}\n\n-- {LONG[:90]}\n"),
        ("start.sh", f"# Usage:\n#   one   {LONG[:80]}\n#   two   {LONG[:80]}\n"),
        ("start.sh", 'echo "${house#room} $#house"\n'),
        ("Makefile", f"# {LONG[:90]}\ntest: ## {LONG[:90]}\n"),
    ],
)
def test_a_correct_file_of_lines_has_no_finding(check: Check, name: str, source: str) -> None:
    assert check(name, source) == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the machines, so that the caller that owns them destroys those that are idle."""\n',
        f'"""{LONG[:90]}. {LONG[:90]}."""\n',
        '"""Lists, e.g. of GPUs, `whatever the code says`, and 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18."""\n',
        'QUERY = "SELECT room FROM house WHERE told ORDER BY beside"\n',
        'KIND = "beside"\n',
        "x = 1  # noqa: stands\n",
        f'"""Table.\n\nLANE   {LONG[:80]}\nOTHER  {LONG[:80]}\n"""\n',
        'raise ValueError("' + "; ".join(["the home is full and the daemon waits for it"] * 4) + '")\n',
    ],
)
def test_a_correct_module_has_no_finding(check: Check, source: str) -> None:
    assert check("module.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "# House\n\n    house\n\n```\nhouse\n```\n",
        "| instead of | write |\n|---|---|\n| house | daemon |\n",
        "[The text](https://example.org/house/told) is short.\n",
        f"| {LONG[:80]}; {LONG[:80]} |\n",
    ],
)
def test_a_correct_page_has_no_finding(check: Check, source: str) -> None:
    assert check("page.md", source) == []
