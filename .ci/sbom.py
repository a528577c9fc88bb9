"""Write a software bill of materials (CycloneDX 1.6, JSON) for each artifact that is shipped, with hashes.

    python .ci/sbom.py --tools FOLDER [FOLDER]      FOLDER: where the files go (default: sbom)
    python .ci/sbom.py --tools FOLDER --audit       ask pip-audit for known vulnerabilities instead

The versions are those of the constraints; uv completes them with hashes and markers of Linux, which needs the package
index. `--tools`: the virtual environment of cyclonedx-bom or pip-audit, because their pins differ from the product's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

UV = Path(".venv/bin/uv")
PLATFORM = ("--python-platform", "x86_64-unknown-linux-gnu", "--python-version", "3.11")
PRODUCTS: dict[str, tuple[tuple[str, ...], str]] = {
    "base": (("pyproject.toml",), "constraints.txt"),
    "server": (("pyproject.toml", "--extra", "server"), "constraints.txt"),
    "broker-image": (("pyproject.toml", "--extra", "server", "--extra", "aws"), "constraints.txt"),
    "trainer-image": (("-",), "constraints-trainer.txt"),
}
"""Arguments of `uv pip compile` and the constraints, by artifact. `-`: the lines of deploy/trainer_requirements.py."""
IMAGE = {
    "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64",
    "python_version": "3.11", "python_full_version": "3.11.15", "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}  # fmt: skip
SKYPILOT = Path("constraints-skypilot.txt")
"""Second environment of the broker's image, which has hashes already."""


def resolved(product: str) -> str:
    """Return the requirements of a product, one version and its hashes each."""
    sources, constraints = PRODUCTS[product]
    command = [UV, "pip", "compile", "--quiet", *PLATFORM, "--no-emit-index-url", "--no-annotate", "--no-header"]
    trainer = [sys.executable, "deploy/trainer_requirements.py", "trackers", "fp8"]
    pinned = subprocess.run(trainer, capture_output=True, text=True, check=True).stdout if sources == ("-",) else None
    # Without --find-links: a wheel of one machine, such as torch's CPU build, is not what the image gets.
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "UV_FIND_LINKS")}
    result = subprocess.run(
        [*command, "--generate-hashes", "-c", constraints, *sources],
        input=pinned, capture_output=True, text=True, env=env,
    )  # fmt: skip
    if result.returncode != 0:
        sys.exit(
            f"sbom: {product} cannot be resolved: {result.stderr.strip().splitlines()[-1]}; check the package index"
        )
    lock = SKYPILOT.read_text() if product == "broker-image" else ""
    return merged(result.stdout, on_linux(lock))


def on_linux(lock: str) -> str:
    """Return the requirements of a universal lock that hold in the image: Linux, CPython 3.11."""
    kept_lines = []
    for entry in entries(lock):
        marker = Requirement(entry.splitlines()[0].rstrip(" \\")).marker
        if marker is None or marker.evaluate(IMAGE):
            kept_lines.append(entry)
    return "".join(kept_lines)


def entries(lock: str) -> list[str]:
    """Return each requirement of a lock with its hashes."""
    return re.findall(r"^[A-Za-z0-9].*\n(?: +--hash.*\n)*", lock, flags=re.MULTILINE)


def merged(first: str, second: str) -> str:
    """Return both locks as one. A package that both pin to one version is listed once."""
    known_names = {entry.split()[0] for entry in entries(first)}
    return first + "".join(entry for entry in entries(second) if entry.split()[0] not in known_names)


def write(product: str, tools: Path, folder: Path) -> None:
    """Write the file of one product."""
    target = folder / f"{product}.cdx.json"
    command = [tools / "bin" / "cyclonedx-py", "requirements", "--pyproject", "pyproject.toml"]
    command += ["--output-reproducible", "--sv", "1.6", "--of", "JSON", "-o", target, "-"]
    result = subprocess.run(command, input=resolved(product), text=True, capture_output=True)
    if result.returncode != 0:
        sys.exit(f"sbom: {product}: {result.stderr.strip().splitlines()[-1]}")
    print(target)


def audit(product: str, tools: Path) -> bool:
    """Print the known vulnerabilities of a product; return True if there are none.

    Exits if the data is out of reach. `--strict`: pip-audit would pass a package that its data source does not answer.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(resolved(product))
        file.flush()
        command = [
            tools / "bin" / "pip-audit",
            "--disable-pip",
            "--require-hashes",
            "--strict",
            "--progress-spinner",
            "off",
        ]
        result = subprocess.run([*command, "-r", file.name], text=True, capture_output=True)
    if "vulnerabilit" not in result.stderr:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"audit: {product} was not checked, the vulnerability data is out of reach ({reason}); run it online")
    print(f"{product}: {result.stderr.strip()}\n{result.stdout}".strip())
    return result.returncode == 0


def main() -> None:
    """Write one file for each product, or check each product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--audit", action="store_true", help="print known vulnerabilities by pip-audit instead")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("sbom"))
    options = parser.parse_args()
    if options.audit:
        outcomes = [audit(product, options.tools) for product in PRODUCTS]
        sys.exit(not all(outcomes))
    options.folder.mkdir(parents=True, exist_ok=True)
    for product in PRODUCTS:
        write(product, options.tools, options.folder)


if __name__ == "__main__":
    main()
