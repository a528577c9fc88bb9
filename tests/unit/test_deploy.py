"""deploy/: containers, compose file and unit hold together with the code, and with each other."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from broker.daemon.config import DaemonConfig

DEPLOY = Path("deploy")
PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BROKER, DATABASE = SERVICES["broker"], SERVICES["database"]
CONTAINERFILES = sorted(DEPLOY.glob("Containerfile.*"))


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments) without comments and line breaks."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, " ".join(rest.split())


def values(word: str, file: Path = DEPLOY / "Containerfile.broker") -> list[str]:
    return [rest for found, rest in instructions(file) if found == word]


def copied(file: Path) -> set[str]:
    """Return the paths of the repository that the file copies."""
    return {source for rest in values("COPY", file) if not rest.startswith("--from") for source in rest.split()[:-1]}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the mounts: volume or host path by container path."""
    long = [entry for entry in service["volumes"] if isinstance(entry, dict)]
    short = [entry.split(":") for entry in service["volumes"] if isinstance(entry, str)]
    return {entry["target"]: entry["source"] for entry in long} | {target: source for source, target, *_ in short}


# ------------------------------------------------------------------------------------------------------- the container


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_files_copied_by_containerfiles_exist_and_reach_the_build(file: Path) -> None:
    assert [name for name in copied(file) if not Path(name).exists()] == []
    let_in = {line[1:] for line in Path(".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied(file) <= let_in


def test_nothing_else_reaches_the_build() -> None:
    lines = Path(".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == set().union(*map(copied, CONTAINERFILES))


def test_the_broker_is_built_with_all_that_its_wheel_is_made_of() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], PROJECT["project"]["readme"], "constraints.txt"}
    assert needed | set(PROJECT["project"]["license-files"]) <= copied(DEPLOY / "Containerfile.broker")


def test_the_brokers_image_installs_the_tested_versions_by_hash() -> None:
    pins = re.findall(
        r"^([\w.-]+==[\w.]+).*\\\n +--hash=sha256:", Path("constraints-broker.txt").read_text(), re.MULTILINE
    )
    assert len(pins) > 50
    assert set(pins) <= set(re.findall(r"^[\w.-]+==[\w.]+", Path("constraints.txt").read_text(), re.MULTILINE))
    assert "--require-hashes --no-deps --requirement constraints-broker.txt" in values("RUN")[0]


def test_the_trainers_image_installs_every_package_by_hash() -> None:
    """A package without a hash would be installed as the index serves it on the day of the build."""
    lock = Path("constraints-trainer.txt").read_text()
    versions = re.findall(r"^[\w.-]+==.*$", lock, re.MULTILINE)
    hashed = re.findall(r"^[\w.-]+==.*\\\n +--hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert len(hashed) == len(versions) > 50
    script = (DEPLOY / "trainer_install.sh").read_text()
    assert '--require-hashes --no-deps --requirement "$source/constraints-trainer.txt"' in script


def test_images_are_of_one_full_version() -> None:
    bases = {rest.split()[0] for rest in values("FROM")}
    assert len(bases) == 1
    for image in (*bases, *(service["image"] for service in SERVICES.values())):
        assert re.search(r":\d+\.\d+[.\d]*(-[a-z-]+)?(@sha256:[0-9a-f]{64})?$", image), image
    assert BROKER["image"].endswith(f":{PROJECT['project']['version']}")


def test_image_serves_without_root_on_the_configured_ports() -> None:
    """The image serves as a user without rights on the ports of the configuration."""
    assert values("USER") == ["10001:10001"]
    config = DaemonConfig(home=Path("/var/lib/gpubroker"))
    assert values("EXPOSE") == [f"{config.port} {config.grpc_port}"]
    assert (values("ENTRYPOINT"), values("CMD")) == (['["gpubroker"]'], ['["serve"]'])


# ---------------------------------------------------------------------------------------------------- the compose file


def test_docker_compose_takes_the_file() -> None:
    plugin = shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True)
    if plugin and plugin.returncode == 0:
        command = ["docker", "compose"]
    elif shutil.which("docker-compose"):
        command = ["docker-compose"]
    else:
        pytest.skip("docker compose is not installed here")
    done = subprocess.run([*command, "-f", "deploy/compose.yaml", "config", "--quiet"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_as_few_rights_as_it_can(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "cap_add" not in service
    assert "ports" not in service  # plaintext stays on loopback
    assert {"restart", "healthcheck", "stop_grace_period"} <= service.keys()
    assert service["memswap_limit"] == service["mem_limit"]  # a host that swaps would stall every other service
    assert service["pids_limit"] > 0
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()


def test_only_the_broker_can_reach_the_database() -> None:
    assert DATABASE["network_mode"] == "none"
    assert "listen_addresses=" in DATABASE["command"]
    socket = mounts(DATABASE)["/var/run/postgresql"]
    assert [name for name, service in SERVICES.items() if socket in mounts(service).values()] == ["database", "broker"]


def test_persistent_folders_are_volumes() -> None:
    assert set(values("VOLUME")) <= mounts(BROKER).keys()
    assert dict(pair.split("=") for pair in values("ENV")[0].split() if "HOME=" in pair) == {
        "HOME": values("VOLUME")[0],
        "GPUBROKER_HOME": values("VOLUME")[0],
    }
    assert mounts(DATABASE)["/var/lib/postgresql"] in COMPOSE["volumes"]


def test_files_of_the_compose_file_are_there_and_keys_are_not_committed() -> None:
    here = [source for service in SERVICES.values() for source in mounts(service).values() if source.startswith("./")]
    ignored = Path(".gitignore").read_text().splitlines()
    missing = [source for source in here if not (DEPLOY / source).exists() and f"/deploy/{source[2:]}/" not in ignored]
    assert missing == []
    assert {"/deploy/tls/", "/deploy/gpubroker.env", "/deploy/compose.override.yaml"} <= set(ignored)
    assert BROKER["env_file"] == [{"path": "gpubroker.env", "required": False}]


def test_the_broker_finds_the_database_that_is_set_up_for_it() -> None:
    url = DaemonConfig.load(DEPLOY / "gpubroker.yaml", env=BROKER["environment"], home=Path("/nowhere")).database_url
    assert url is not None
    at = urlsplit(url)
    (folder,) = parse_qs(at.query)["host"]
    assert mounts(BROKER)[folder] == mounts(DATABASE)["/var/run/postgresql"]
    setup = (DEPLOY / "postgres/init.sh").read_text()
    role, database = at.username, at.path[1:]
    assert f"CREATE ROLE {role} LOGIN CREATEROLE;" in setup
    assert f"CREATE DATABASE {database} OWNER {role};" in setup
    assert re.search(rf"^local +{database} +{role} +trust$", setup, re.MULTILINE)
    assert {f"--username={role}", f"--dbname={database}"} <= set(DATABASE["healthcheck"]["test"])


def test_every_variable_is_one_that_the_code_reads() -> None:
    texts = "".join(file.read_text() for room in ("broker", "providers") for file in Path(room).rglob("*.py"))
    assert [name for name in BROKER["environment"] if f'"{name}"' not in texts] == []


def test_the_examples_in_the_settings_are_settings() -> None:
    text = (DEPLOY / "gpubroker.yaml").read_text()
    assert DaemonConfig.model_validate(yaml.safe_load(text) or {}).host == "127.0.0.1"
    blocks = re.findall(r"^#\n((?:#(?: .*)?\n)+)", text, re.MULTILINE)
    rented, served = (yaml.safe_load(re.sub(r"^# ?", "", block, flags=re.MULTILINE)) for block in blocks)
    assert DaemonConfig.model_validate(rented).providers.rented()
    config = DaemonConfig.model_validate(served)
    assert config.providers.local is None
    assert config.tls is not None
    assert {str(config.tls.certificate.parent), str(config.tls.key.parent)} <= mounts(BROKER).keys()


def test_the_set_up_script_writes_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "psql").write_text(f"#!/bin/sh\ncat >{tmp_path}/sql\n")
    (tmp_path / "psql").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PGDATA": str(tmp_path)}
    subprocess.run([DEPLOY / "postgres/init.sh"], env=env, check=True)
    assert "CREATEROLE" in (tmp_path / "sql").read_text()
    rules = [line.split() for line in (tmp_path / "pg_hba.conf").read_text().splitlines()]
    assert rules == [["local", "gpubroker", "gpubroker", "trust"], ["local", "all", "postgres", "peer"]]


def test_the_health_check_is_quick_to_start() -> None:
    """The health check runs every 30 s while jobs run, so it imports nothing heavy."""
    assert BROKER["healthcheck"]["test"] == ["CMD", "python", "-m", "broker.daemon.healthcheck"]
    code = "import broker.daemon.healthcheck, json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"aiohttp", "pydantic", "grpc", "asyncpg", "typer"} & set(json.loads(done.stdout))


# ---------------------------------------------------------------------------------------------------------------- unit


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here (Debian: systemd)")
    text = (DEPLOY / "systemd/gpubroker.service").read_text()
    assert "ExecStart=/opt/gpubroker/bin/gpubroker serve\n" in text
    assert {"MemoryMax=4G", "MemorySwapMax=0", "TasksMax=4096"} <= set(text.splitlines())
    unit = tmp_path / "gpubroker.service"
    unit.write_text(text.replace("/opt/gpubroker/bin/gpubroker", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_drop_in_permits_isolated_jobs_and_no_more() -> None:
    """The daemon keeps an empty capability set, so neither setting protects against it."""
    unit, drop_in = [
        {line for line in (DEPLOY / "systemd" / name).read_text().splitlines() if line and not line.startswith("#")}
        for name in ("gpubroker.service", "isolated-jobs.conf")
    ]
    assert {"CapabilityBoundingSet=", "NoNewPrivileges=yes", "User=gpubroker"} <= unit
    assert drop_in == {"[Service]", "ProtectKernelTunables=no", "ProtectKernelLogs=no"}
    assert {line.replace("=no", "=yes") for line in drop_in} <= unit


def test_the_trainers_extras_name_all_that_it_imports() -> None:
    """A trainer's machine has only these packages, not those of the broker."""
    imported: set[str] = set()
    for file in Path("trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    extras = PROJECT["project"]["optional-dependencies"]
    listed = {
        _plain(re.split(r"[<>=;\[ ]", line)[0]) for name in ("trainer", "trackers", "fp8") for line in extras[name]
    }
    known = packages_distributions()
    others = imported - sys.stdlib_module_names - {"trainer"}
    found = {name: known.get(name, [name]) for name in others}
    assert {name: of for name, of in found.items() if not listed & {_plain(one) for one in of}} == {}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
