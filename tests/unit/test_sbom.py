"""Bills of materials: what they list, and an audit that could not ask is not a success."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

LOCK = """\
# a comment
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
numpy==1.0 ; python_full_version < '3.11' \\
    --hash=sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
numpy==2.0 ; python_full_version >= '3.11' \\
    --hash=sha256:cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc \\
    --hash=sha256:dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd
six==1.17.0 \\
    --hash=sha256:eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee
"""


@pytest.fixture
def sbom(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(".ci")
    return import_module("sbom")


def tool(folder: Path, name: str, text: str) -> Path:
    """Write a program that prints `text` to stderr and fails."""
    (folder / "bin").mkdir()
    program = folder / "bin" / name
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.stderr.write({text!r})\nsys.exit(1)\n")
    program.chmod(0o755)
    return folder


def test_all_that_is_shipped_has_a_bill(sbom: Any) -> None:
    assert set(sbom.PRODUCTS) == {"base", "server", "broker-image", "trainer-image"}
    for _, constraints in sbom.PRODUCTS.values():
        assert Path(constraints).exists()


def test_only_what_the_image_gets_is_listed_with_all_hashes(sbom: Any) -> None:
    assert [entry.split()[0] for entry in sbom.entries(sbom.on_linux(LOCK))] == ["numpy==2.0", "six==1.17.0"]
    assert sbom.on_linux(LOCK).count("--hash=") == 3


def test_a_package_of_both_environments_is_listed_once(sbom: Any) -> None:
    merged = sbom.merged("six==1.17.0 \\\n    --hash=sha256:ee\nnumpy==1.0\n", sbom.on_linux(LOCK))
    assert [entry.split()[0] for entry in sbom.entries(merged)] == ["six==1.17.0", "numpy==1.0", "numpy==2.0"]


def test_an_audit_without_its_data_says_so(sbom: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sbom, "resolved", lambda product: "six==1.17.0\n")
    with pytest.raises(SystemExit, match=r"base was not checked, the vulnerability data is out of reach \(ERROR: no\)"):
        sbom.audit("base", tool(tmp_path, "pip-audit", "ERROR: no\n"))


def test_known_vulnerabilities_fail_the_audit(sbom: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sbom, "resolved", lambda product: "six==1.17.0\n")
    assert sbom.audit("base", tool(tmp_path, "pip-audit", "Found 1 known vulnerability in 1 package\n")) is False


@pytest.mark.skipif(not Path(".venv-sbom/bin/cyclonedx-py").exists(), reason="`make sbom` has not run here")
def test_the_bill_is_cyclonedx(sbom: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sbom, "resolved", lambda product: sbom.on_linux(LOCK))
    sbom.write("base", Path(".venv-sbom"), tmp_path)
    bill = json.loads((tmp_path / "base.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {(part["name"], part["version"]) for part in bill["components"]} == {("numpy", "2.0"), ("six", "1.17.0")}
