"""Runs the command line as in an installation without extras: `python -m tests.cli.base_install HIDDEN WORDS...`

HIDDEN is `hidden()` as JSON. Without words, loads every command and prints those that need a missing package.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
OWN = ("broker", "providers", "trainer", "tests")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(requirements: list[str], above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the installed distributions that the requirements need, without those of extras."""
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        name = normal(re.split(r"[\s\[<>=!~(]", text.strip())[0])
        if "extra" in marker or name in above:
            continue
        try:
            known: Distribution = distribution(name)
        except PackageNotFoundError:
            continue
        yield name
        yield from installed(known.requires or [], above | {name})


class BaseFinder:
    """A finder of modules that does not find the packages in `hidden`."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, *where)


def hidden() -> set[str]:
    """Return third-party packages of this environment that an installation without extras does not have."""
    base = {*installed(tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])}
    tops = packages_distributions()
    return {top for top, names in tops.items() if not {normal(name) for name in names} & base} - {*OWN}


def main(without: str, *words: str) -> None:
    finders: list[Any] = [BaseFinder(finder, {*json.loads(without)}) for finder in sys.meta_path]
    sys.meta_path[:] = finders
    if words:
        from broker.cli import main as run

        sys.argv = ["gpubroker", *words]
        return run()
    from broker.cli.main import COMMANDS, Commands

    for name in COMMANDS:
        try:
            Commands(name="gpubroker").load(name)
        except ModuleNotFoundError as e:
            print(name, e.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
