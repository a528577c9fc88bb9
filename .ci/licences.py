"""Check that nothing that is shipped with gpubroker is under the AGPL or GPL: `.venv/bin/python .ci/licences.py`.

Reads the licences that the installed packages state. `.venv` holds client and daemon (pyproject.toml) and the trainer
(constraints-trainer.txt), `.venv-skypilot` SkyPilot's environment. A package under the LGPL, and one that states no
licence or is not installed here, needs a line in EXCEPTIONS. Prints one line a problem, and one a shipped artifact;
exits with 1 if there is a problem.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NVIDIA = "NVIDIA's licence, which lets applications ship it; installed on machines with a GPU only"
EXCEPTIONS: Mapping[str, str] = {
    "cuda-bindings": NVIDIA,
    "cuda-pathfinder": "Apache-2.0; installed on machines with a GPU only",
    "cuda-toolkit": NVIDIA,
    "docutils": "only its Emacs mode, which is not in the wheel, is under the GPL; the rest is public domain or BSD",
    "paramiko": "LGPL-2.1: Python modules that SkyPilot and runpod import unchanged, and that can be replaced",
    "psycopg2-binary": "LGPL with exceptions: a shared library that SkyPilot loads unchanged, and that can be replaced",
    "torchao": "BSD-3-Clause by its LICENSE file; its metadata state none",
    "triton": "MIT; installed on machines with a GPU only",
}
"""Reason by package."""
PREFIXES: Mapping[str, str] = {"nvidia-": NVIDIA}
"""Reason by the beginning of packages' names."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SERVER_EXTRAS = ("server", "aws", "plots")
LESSER = re.compile(r"LGPL|LESSER GENERAL PUBLIC|LIBRARY OR LESSER", re.IGNORECASE)
COPYLEFT = re.compile(r"\bA?GPL|AFFERO|GENERAL PUBLIC LICENSE", re.IGNORECASE)


def installed(folder: Path | None = None) -> dict[str, Distribution]:
    """The packages of this environment, or of another one, by name."""
    installed_distributions = distributions() if folder is None else distributions(path=[str(folder)])
    return {canonicalize_name(package.name): package for package in installed_distributions}


def closure(requirements: Iterable[str], packages: Mapping[str, Distribution]) -> set[str]:
    """The names of what these requirements install here, with all that they require themselves."""
    names: set[tuple[str, str]] = set()
    left = [(line, "") for line in requirements]
    while left:
        line, extra = left.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key not in names:
                names.add(key)
                package = packages.get(key[0])
                left += [(inner, wanted) for inner in (package.requires or () if package else ())]
    return {name for name, _ in names}


def on_linux(constraints: Iterable[str]) -> Iterator[str]:
    """The names of the constraints that hold on Linux under any supported Python."""
    for line in constraints:
        if "==" in line:
            requirement = Requirement(line.rstrip(" \\"))
            marker = requirement.marker
            environments = ({"sys_platform": "linux", "python_full_version": f"{python}.0"} for python in PYTHONS)
            if marker is None or any(map(marker.evaluate, environments)):
                yield canonicalize_name(requirement.name)


def shipped() -> Iterator[tuple[str, set[str], Mapping[str, Distribution]]]:
    """Each artifact, its packages, and where their licences are read."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras, own = project["optional-dependencies"], installed()
    base = closure(project["dependencies"], own)
    yield "base", base, own
    yield "server", base | closure((line for name in SERVER_EXTRAS for line in extras.get(name, ())), own), own
    yield "trainer", set(on_linux(Path("constraints-trainer.txt").read_text().splitlines())), own
    [folder] = Path(".venv-skypilot/lib").glob("python3*/site-packages")
    image = installed(folder)
    yield "skypilot", set(image), image


def stated(package: Distribution) -> str:
    """Return the licence that a package states: the expression, or the first line of the old field and the
    classifiers.
    """
    facts = package.metadata
    licence_lines = str(facts["License"] or "").strip().splitlines()[:1]
    classes = [line for line in facts.get_all("Classifier") or () if line.startswith("License ::")]
    return str(facts["License-Expression"] or "") or " ".join([*licence_lines, *classes])


def problem(name: str, package: Distribution | None) -> str | None:
    """Why this package needs an exception; None: it does not."""
    if package is None:
        return "not installed here, so its licence is not known"
    text = stated(package)
    if not text:
        return "states no licence"
    rest = LESSER.sub("", text)
    if COPYLEFT.search(rest) or LESSER.search(text):
        return text
    return None


def main() -> int:
    failed = False
    for artifact, names, packages in shipped():
        for name in sorted(names):
            why = problem(name, packages.get(name))
            if why is not None and name not in EXCEPTIONS and not name.startswith(tuple(PREFIXES)):
                print(f"{artifact}: {name}: {why}")
                failed = True
        print(f"{artifact}: {len(names)} packages")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
