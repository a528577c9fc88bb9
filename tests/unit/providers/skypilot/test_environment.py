"""SkyPilot's own environment: found, made without an index, and given the plugin of this gpubroker."""

import ast
import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.core.exit_codes import Exit
from broker.cli.main import app
from broker.domain.errors import Rejected
from providers.skypilot import environment
from providers.skypilot.environment import find_python, has_plugin, locked_requirements, problem, require_plugin
from providers.skypilot.plugin.shared import PACKAGE, PLUGIN_FILES, PLUGIN_VERSION, SKY_VERSION
from providers.skypilot.plugin_wheel import write_wheel


def made(venv: Path, *packages: str) -> Path:
    """Return the interpreter of a folder that looks like an environment with those packages."""
    for folder in (venv / "bin", *(venv / "lib/python3.11/site-packages" / f"{name}.dist-info" for name in packages)):
        folder.mkdir(parents=True, exist_ok=True)
    (venv / "bin/python").touch()
    return venv / "bin/python"


def fake_skypilot(folder: Path, version: str) -> bytes:
    """Write a wheel with SkyPilot's name and return the line that locks it."""
    name = f"skypilot-{version}"
    files = {
        "sky/__init__.py": "",
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: skypilot\nVersion: {version}\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{name}.dist-info/RECORD", "".join(f"{path},,\n" for path in files))
    return f"skypilot=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n".encode()


# ------------------------------------------------------------------------------------------------------------- finding


def test_python_is_the_set_one_then_the_homes_then_the_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = tmp_path / "home/providers"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "opt/gpubroker"))
    in_home = providers / "skypilot/venv/bin/python"
    assert find_python(None, providers) == in_home, "where none is, the one that `clouds install` would make"
    neighbour = made(tmp_path / "opt/gpubroker-skypilot")
    assert find_python(None, providers) == neighbour
    made(providers / "skypilot/venv")
    assert find_python(None, providers) == in_home
    assert find_python(tmp_path / "own/bin/python", providers) == tmp_path / "own/bin/python"


def test_missing_packages_are_named_with_the_fix(tmp_path: Path) -> None:
    fix = "; run `gpubroker clouds install`"
    for venv, packages, expected in (
        ("none", None, f"SkyPilot's environment is missing ({tmp_path}/none/bin/python){fix}"),
        ("empty", (), f"SkyPilot's environment ({tmp_path}/empty/bin/python) has no skypilot, not {SKY_VERSION}{fix}"),
        ("old", ("skypilot-0.9.0",), f"({tmp_path}/old/bin/python) has skypilot 0.9.0, not {SKY_VERSION}{fix}"),
    ):
        python = tmp_path / venv / "bin/python" if packages is None else made(tmp_path / venv, *packages)
        assert (problem(python) or "").endswith(expected)
        with pytest.raises(Rejected, match="run `gpubroker clouds install`"):
            require_plugin(python)
    assert problem(made(tmp_path / "ready", f"skypilot-{SKY_VERSION}")) is None


# --------------------------------------------------------------------------------------------------------- the plugin


def test_the_plugin_imports_no_other_module_of_gpubroker() -> None:
    for name, content in PLUGIN_FILES.items():
        for node in ast.walk(ast.parse(content)) if name.endswith(".py") else ():
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{name}: {node.module}"
                modules = [node.module or ""] if node.level == 0 else []
            assert not {module.split(".")[0] for module in modules} & {"broker", "providers", "trainer"}, name


def test_the_wheel_is_the_same_each_time_and_holds_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    wheel, again = write_wheel(tmp_path), write_wheel(tmp_path / "again")
    assert wheel.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    assert {name: content[f"{PACKAGE}/{name}"] for name in PLUGIN_FILES} == PLUGIN_FILES
    assert "vastai_sdk.py" in content
    [record] = [text.decode() for name, text in content.items() if name.endswith("/RECORD")]
    recorded = dict(line.split(",")[:2] for line in record.splitlines())
    assert recorded.keys() == content.keys()
    for name, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        assert recorded[name] in (f"sha256={digest}", "")


def test_skypilots_environment_has_the_plugin_under_both_names(tmp_path: Path) -> None:
    from tests.support.skypilot import run_in_skypilot

    program = "import vastai_sdk, gpubroker_skypilot.shared as s; print(vastai_sdk.VastAI.__module__, s.PLUGIN_VERSION)"
    assert run_in_skypilot(program, home=tmp_path).split() == [f"{PACKAGE}.vastai_sdk", PLUGIN_VERSION]


# -------------------------------------------------------------------------------------------------------- installing


def test_install_needs_no_index_and_an_upgrade_replaces_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    locked = fake_skypilot(links, SKY_VERSION)
    monkeypatch.setattr(environment, "locked_requirements", lambda: locked)
    home, install = tmp_path / "home", ("clouds", "install", "--json", "--find-links", str(links), "--home")
    done = CliRunner().invoke(app, [*install, str(home)])
    assert done.exit_code == 0, done.output
    python = find_python(None, home / "providers")
    assert json.loads(done.stdout) == {"python": str(python), "skypilot": SKY_VERSION}
    assert (problem(python), has_plugin(python)) == (None, True)
    [own] = python.parent.parent.glob(f"lib/python3*/site-packages/{PACKAGE}-*.dist-info")
    own.rename(own.with_name(f"{PACKAGE}-{SKY_VERSION}+gold.dist-info"))
    assert not has_plugin(python)
    require_plugin(python)
    assert has_plugin(python)


def test_install_with_a_wrong_hash_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_run", refuse)
    done = CliRunner().invoke(app, ["clouds", "install", "--venv", str(tmp_path / "venv")])
    assert done.exit_code == Exit.SERVER_PROBLEM
    assert "SkyPilot's environment could not be made" in done.output


def refuse(argv: list[str]) -> None:
    raise Rejected(f"SkyPilot's environment could not be made: `{' '.join(argv)}` ended with 1")


def test_every_locked_package_has_hashes_and_none_is_vasts_own() -> None:
    text = locked_requirements().decode()
    entries = [entry for entry in text.replace("\\\n", " ").splitlines() if "==" in entry]
    assert entries
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "skypilot==" + SKY_VERSION in text
    assert not {"vastai", "vastai-sdk", "borb"} & {entry.split("==")[0] for entry in entries}
    assert "://" not in text
