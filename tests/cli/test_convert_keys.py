"""Every documented key of a task file is converted, or listed among the remarks."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.cli.commands.convert import converted

SKYPILOT_TASK: dict[str, Any] = {
    "name": "x", "workdir": "./code", "num_nodes": 2, "envs": {"A": "1"}, "secrets": {"B": "2"}, "setup": "pip list",
    "file_mounts": {"/data": "s3://b"}, "volumes": {"/v": "vol"}, "config": {"docker": {}}, "pool": "p",
    "service": {"readiness_probe": "/"}, "event_callback": "true", "managed_secrets": ["s"], "inputs": {"a": 1.0},
    "outputs": {"b": 1.0}, "volume_mounts": ["m"], "file_mounts_mapping": {"a": "b"}, "api_server_access": True,
}  # fmt: skip
"""Keys of a task in the schema of SkyPilot 0.14.1, with a value of each."""
SKYPILOT_RESOURCES: dict[str, Any] = {
    "accelerators": "H100:8", "accelerator_args": {"runtime_version": "x"}, "any_of": [{"infra": "aws"}],
    "autostop": 10, "cloud": "aws", "cpus": 4, "disk_size": 100, "disk_tier": "best", "ephemeral_storage": 5,
    "image_id": "ami-1", "infra": "aws", "instance_type": "p5.48xlarge", "job_recovery": "FAILOVER",
    "labels": {"a": "b"}, "local_disk": "nvme:100", "max_hourly_cost": 3.0, "memory": 8, "network_tier": "best",
    "ordered": [{"infra": "aws"}], "ports": 80, "priority": 0, "priority_class": "high", "region": "us-east-1",
    "use_spot": True, "volumes": [{"path": "/m"}], "zone": "us-east-1a",
}  # fmt: skip
"""Keys of `resources` in the same schema."""
SKYPILOT_INNER = [
    ("job_recovery", {"strategy": "FAILOVER"}), ("job_recovery", {"max_restarts_on_errors": 3}),
    ("job_recovery", {"recover_on_exit_codes": [33]}), ("autostop", {"hook": "a"}), ("autostop", {"hook_timeout": 9}),
    ("autostop", {"idle_minutes": 5}), ("autostop", {"down": True}), ("autostop", {"wait_for": "none"}),
]  # fmt: skip
DSTACK_TASK: dict[str, Any] = {
    "name": "x", "image": "a/b:1", "user": "ubuntu", "privileged": True, "entrypoint": "sh", "working_dir": "/w",
    "home_dir": "/root", "registry_auth": {"username": "u"}, "python": "3.12", "nvcc": True, "single_branch": True,
    "env": ["A=1"], "shell": "bash", "priority": 5, "volumes": ["v:/v"], "docker": True, "repos": ["./code"],
    "files": ["a:b"], "setup": ["pip list"], "ports": [80], "nodes": 2, "backends": ["aws"], "regions": ["us-east-1"],
    "availability_zones": ["us-east-1a"], "instance_types": ["p3"], "reservation": "r", "spot_policy": "auto",
    "retry": True, "max_duration": "2h", "stop_duration": False, "max_price": 3.0, "creation_policy": "reuse",
    "idle_duration": 0, "utilization_policy": {"min_gpu_utilization": 10, "time_window": "30m"},
    "startup_order": "any", "stop_criteria": "all-done", "schedule": {"cron": "* * * * *"}, "fleets": ["f"],
    "instances": ["i"], "tags": {"a": "b"}, "retry_policy": {"retry": True}, "pool_name": "p", "instance_name": "i",
    "termination_policy": "dont-destroy", "termination_idle_time": 5,
}  # fmt: skip
"""Keys of dstack's task and profile models, read in November 2026, with a value of each."""
DSTACK_RESOURCES: dict[str, Any] = {
    "cpu": "arm:8..", "memory": "8GB..", "shm_size": "8GB", "gpu": "H100:2", "disk": "500GB"
}  # fmt: skip
DSTACK_GPU: dict[str, Any] = {
    "vendor": "amd", "name": "A100", "count": 2, "memory": "24GB..", "total_memory": "48GB", "compute_capability": 7.5
}  # fmt: skip
DSTACK_REPO: dict[str, Any] = {"branch": "main", "hash": "abc", "path": "/w", "if_exists": "skip", "url": "https://a/b"}
SKYPILOT: dict[str, Any] = {"run": "python a.py"}
DSTACK: dict[str, Any] = {"type": "task", "commands": ["python a.py"]}


def is_treated(folder: Path, plain: dict[str, Any], task: dict[str, Any], *path: str) -> bool:
    """Return whether the setting at `path` of `task` changes the spec, or a remark names the setting."""
    conversions = []
    for name, document in (("plain", plain), ("task", task)):
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document))
        conversions.append(converted(file))
    before, after = conversions
    field = ".".join(path)
    named = {where for where, _ in (*after.lost, *after.hints)} - {where for where, _ in (*before.lost, *before.hints)}
    without_name = ({k: v for k, v in spec.items() if k != "name"} for spec in (before.spec, after.spec))
    is_converted = after.spec["name"] == "x" if path == ("name",) else len({str(spec) for spec in without_name}) == 2
    return is_converted or any(f"{where}.".startswith(f"{field}.") for where in named)


@pytest.mark.parametrize("key", SKYPILOT_TASK)
def test_keys_of_a_skypilot_task_are_treated(tmp_path: Path, key: str) -> None:
    assert is_treated(tmp_path, SKYPILOT, SKYPILOT | {key: SKYPILOT_TASK[key]}, key)


@pytest.mark.parametrize("key", SKYPILOT_RESOURCES)
def test_keys_of_skypilot_resources_are_treated(tmp_path: Path, key: str) -> None:
    task = SKYPILOT | {"resources": {key: SKYPILOT_RESOURCES[key]}}
    assert is_treated(tmp_path, SKYPILOT, task, "resources", key)


@pytest.mark.parametrize(("key", "value"), SKYPILOT_INNER)
def test_inner_keys_of_skypilot_resources_are_treated(tmp_path: Path, key: str, value: dict[str, Any]) -> None:
    inner = () if "idle_minutes" in value or "down" in value or "wait_for" in value else tuple(value)
    task = SKYPILOT | {"resources": {key: value}}
    assert is_treated(tmp_path, SKYPILOT, task, "resources", key, *inner)


@pytest.mark.parametrize("key", DSTACK_TASK)
def test_keys_of_a_dstack_task_are_treated(tmp_path: Path, key: str) -> None:
    assert is_treated(tmp_path, DSTACK, DSTACK | {key: DSTACK_TASK[key]}, key)


@pytest.mark.parametrize("key", DSTACK_RESOURCES)
def test_keys_of_dstack_resources_are_treated(tmp_path: Path, key: str) -> None:
    assert is_treated(tmp_path, DSTACK, DSTACK | {"resources": {key: DSTACK_RESOURCES[key]}}, "resources", key)


@pytest.mark.parametrize("key", DSTACK_GPU)
def test_keys_of_a_dstack_gpu_are_treated(tmp_path: Path, key: str) -> None:
    plain = DSTACK | {"resources": {"gpu": {}}}
    task = DSTACK | {"resources": {"gpu": {key: DSTACK_GPU[key]}}}
    assert is_treated(tmp_path, plain, task, "resources", "gpu", key)


@pytest.mark.parametrize("key", DSTACK_REPO)
def test_keys_of_a_dstack_repo_are_treated(tmp_path: Path, key: str) -> None:
    task = DSTACK | {"repos": [{"local_path": ".", key: DSTACK_REPO[key]}]}
    assert is_treated(tmp_path, DSTACK | {"repos": [{"local_path": "."}]}, task, "repos", "0", key)


def test_a_processor_and_a_maximum_that_are_lost_are_listed(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        "type: task\ncommands: [a]\nresources: {cpu: {arch: arm, count: 4..8}, memory: {min: 1, max: 2}}\n"
        "repos: ['.:/w']\n"
    )
    lost = [where for where, _ in converted(tmp_path / "task.yaml").lost]
    assert lost == ["repos.0.path", "resources.cpu", "resources.cpu", "resources.memory"]
