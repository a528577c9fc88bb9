"""Requirements of a script job: an environment of its own above the packages of its Python, and errors by name."""

import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.trainer.support.harness import Agent, Bench
from trainer.agent.program_setup import program_python
from trainer.contract.documents import Outcome
from trainer.contract.script import ScriptConfig

WHEEL = "needed-1.0-py3-none-any.whl"
PROGRAM = b"import needed, pydantic\nprint('program has', needed.WORD, needed.__file__)\n"


def wheel() -> bytes:
    """Return a package of one module, so that no index is asked."""
    files = {
        "needed.py": "WORD = 'installed'\n",
        "needed-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: needed\nVersion: 1.0\n",
        "needed-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "needed-1.0.dist-info/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def start(bench: Bench, *, listed: str = f"./{WHEEL}\npydantic\n", name: str = "deep/needs.txt") -> Agent:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in {"main.py": PROGRAM, WHEEL: wheel(), "deep/needs.txt": listed.encode()}.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    config = ScriptConfig(
        code="upload:x", command=("python3", "main.py"), requirements=name, setup=("python -c 'import needed'",)
    )
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return bench.start(script=config, code=bench.data(buffer.getvalue(), "tar"), env={"PATH": search})


def test_packages_are_added_to_those_of_the_programs_python(bench: Bench) -> None:
    agent = start(bench)
    assert agent.wait().outcome is Outcome.COMPLETED, agent.log
    assert "[agent] setup: deep/needs.txt: installs into an environment of " in agent.log
    assert "program has installed " in agent.log
    installed = Path(agent.log.split("program has installed ")[1].split()[0])
    assert "-packages/" in str(installed)
    assert not (Path(sys.prefix) / "lib" / f"python3.{sys.version_info[1]}" / "site-packages" / "needed.py").exists()


def test_a_requirement_that_cannot_be_installed_ends_the_job(bench: Bench) -> None:
    agent = start(bench, listed="./absent-1.0-py3-none-any.whl\n")
    final = agent.wait()
    assert final.outcome is Outcome.USER_ERROR
    assert final.message.startswith("setup: deep/needs.txt exited with ")
    assert "; its last line: " in final.message
    assert "program has" not in agent.log


def test_a_missing_file_is_named(bench: Bench) -> None:
    final = start(bench, name="needs.txt").wait()
    assert (final.outcome, final.message) == (
        Outcome.USER_ERROR, "script.requirements: the code has no file needs.txt",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/etc/passwd", "../needs.txt", "a/../../b", ""])
def test_a_file_outside_the_code_is_refused(path: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ScriptConfig(code="x", command=("a",), requirements=path)
    assert refused.value.errors()[0]["loc"] == ("requirements",)


def test_the_environment_is_one_of_the_python_that_the_command_names(tmp_path: Path) -> None:
    for name in ("python3", "python3.12", "other"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": str(tmp_path)}
    assert program_python(["python3.12", "x.py"], env) == str(tmp_path / "python3.12")
    assert program_python(["other"], env) == str(tmp_path / "python3")
    assert program_python(["python9"], env) == str(tmp_path / "python3")
    assert program_python([str(tmp_path / "python3.12")], {"PATH": ""}) == str(tmp_path / "python3.12")
    assert program_python(["other"], {"PATH": "/nowhere"}) == sys.executable
