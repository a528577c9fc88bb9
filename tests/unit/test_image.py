"""`make image`: the installed engine builds and pushes; the script prints the line for gpubroker.yaml."""

import subprocess
from pathlib import Path

import pytest

from broker.daemon.config import PINNED

ROOT = Path(__file__).parent.parent.parent
DIGEST = "sha256:" + "5c" * 32
ENGINE = """#!/bin/bash
echo "$(basename "$0") $*" >>"$RECORD"
while [ $# -gt 0 ]; do
    [ "$1" = --digestfile ] && echo "$DIGEST" >"$2"
    [ "$1" = inspect ] && printf 'other.example/n@sha256:00\\nteam/trainer@%s\\n' "$DIGEST"
    shift
done
exit 0
"""


def image(folder: Path, engine: str | None, *name: str) -> subprocess.CompletedProcess[str]:
    """Run deploy/image.sh with only one engine on PATH, which only records its arguments."""
    for program in ("bash", "dirname", "basename", "mktemp", "rm", "sed", "head", "env"):
        (folder / program).symlink_to(f"/usr/bin/{program}")
    if engine:
        (folder / engine).write_text(ENGINE)
        (folder / engine).chmod(0o755)
    env = {"PATH": str(folder), "RECORD": str(folder / "record"), "DIGEST": DIGEST}
    argv = [str(ROOT / "deploy" / "image.sh"), *name]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("engine", ["podman", "docker", "buildah"])
@pytest.mark.parametrize("name", ["docker.io/team/trainer:1.0", "registry.example:5000/team/trainer"])
def test_the_digest_is_printed_for_the_configuration(tmp_path: Path, engine: str, name: str) -> None:
    done = image(tmp_path, engine, name)
    assert done.returncode == 0, done.stderr
    recorded = (tmp_path / "record").read_text()
    assert f"{engine} build --file deploy/Containerfile.trainer --tag {name} ." in recorded
    assert f"{engine} push" in recorded
    reference = done.stdout.split("image: ")[1].strip()
    assert reference == f"{name.removesuffix(':1.0')}@{DIGEST}"
    assert PINNED.fullmatch(reference)


def test_without_a_name_the_image_is_only_built(tmp_path: Path) -> None:
    done = image(tmp_path, "podman")
    assert done.returncode == 0
    assert "push" not in (tmp_path / "record").read_text()
    assert "make image IMAGE=" in done.stdout


def test_without_an_engine_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = image(tmp_path, None)
    assert done.returncode == 1
    assert "podman, docker or buildah" in done.stderr
    assert done.stderr.count("\n") == 1
