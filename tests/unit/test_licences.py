"""The licence gate of `make licences`."""

import sys
from importlib import import_module
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(".ci")
    monkeypatch.delitem(sys.modules, "licences", raising=False)
    return import_module("licences")


def package(folder: Path, *fields: str) -> Distribution:
    folder.joinpath("METADATA").write_text(
        "\n".join(("Metadata-Version: 2.4", "Name: x", "Version: 1", *fields)) + "\n"
    )
    return Distribution.at(folder)


@pytest.mark.parametrize(
    ("fields", "needs_an_exception"),
    [
        (("License-Expression: MIT",), False),
        (("License: AGPL-3.0",), True),
        (("License: GNU Affero General Public License v3",), True),
        (("License-Expression: GPL-3.0-only",), True),
        (("Classifier: License :: OSI Approved :: GNU General Public License v2 (GPLv2)",), True),
        (("Classifier: License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)",), True),
        (("License-Expression: BSD-3-Clause", "Classifier: License :: OSI Approved :: BSD License"), False),
        ((), True),
    ],
)
def test_copyleft_and_unstated_licences_need_an_exception(
    gate: Any, tmp_path: Path, fields: tuple[str, ...], needs_an_exception: bool
) -> None:
    assert (gate.problem("x", package(tmp_path, *fields)) is not None) == needs_an_exception


def test_a_package_that_is_not_installed_needs_an_exception(gate: Any) -> None:
    assert gate.problem("x", None) == "not installed here, so its licence is not known"


def test_a_copyleft_package_among_the_shipped_ones_fails_the_gate(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = package(tmp_path, "License: AGPL-3.0")
    monkeypatch.setattr(gate, "shipped", lambda: [("skypilot", {"borb"}, {"borb": found})])
    assert gate.main() == 1
    assert capsys.readouterr().out == "skypilot: borb: AGPL-3.0\nskypilot: 1 packages\n"


def test_requirements_of_shipped_packages_are_shipped(gate: Any, tmp_path: Path) -> None:
    inner = package(
        tmp_path, "Requires-Dist: deep", "Requires-Dist: no; extra == 'other'", "Requires-Dist: e; extra == 'x'"
    )
    assert gate.closure(["top[x]", "not; python_version < '3'"], {"top": inner}) == {"top", "deep", "e"}


def test_a_constraint_for_no_linux_is_not_shipped(gate: Any) -> None:
    lines = ["# a comment", "a==1 \\", "    --hash=sha256:0"]
    lines += ["b==2 ; sys_platform == 'win32'", "c==3 ; python_full_version >= '3.14'"]
    assert [*gate.on_linux(lines)] == ["a", "c"]
