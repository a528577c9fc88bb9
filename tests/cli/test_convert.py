"""`gpubroker convert`: tasks of SkyPilot and dstack become valid specs, and no setting is lost silently."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.commands.convert import converted
from broker.cli.core.exit_codes import BadInput
from broker.cli.main import app
from broker.cli.spec.spec_file import load

SKY = """\
name: My_Task
workdir: ./code
num_nodes: 2
resources:
  infra: aws/us-east-1/us-east-1a
  accelerators: H100:8
  use_spot: true
  cpus: 4+
  image_id: docker:ubuntu:latest
  max_hourly_cost: 40.0
  labels: {project: x}
  autostop: 10m
  job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 3}
envs: {MODEL_SIZE: 13b, EPOCHS: 3, LR: 1e-4, VERSION: 1.10, BUCKET: null}
secrets: {HF_TOKEN: my-secret-value}
file_mounts: {/data: s3://my-bucket}
setup: |
  pip install -r requirements.txt
run: |
  python train.py --size ${MODEL_SIZE} --rank $SKYPILOT_NODE_RANK
"""
DSTACK = """\
type: task
name: train
python: "3.11"
repos: [., "https://github.com/a/b"]
commands: [python train.py --epochs 3]
env: [HF_TOKEN, LR=1e-4, "URL=${{ secrets.URL }}", "OTHER=${{ secrets.X }}"]
backends: [aws, vastai, gcp]
regions: [us-east-1]
nodes: 2
spot_policy: auto
max_price: 10
max_duration: 6h
priority: 3
tags: {project: x}
idle_duration: 5m
retry: {on_events: [no-capacity, interruption, error], duration: 1h}
resources: {gpu: "nvidia:H100,A100:80GB:2..4", disk: 200GB}
image: ghcr.io/me/train:1
utilization_policy: {min_gpu_utilization: 10, time_window: 30m}
"""


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["convert", *words])


def fields(remarks: list[tuple[str, str]]) -> list[str]:
    return sorted(field for field, _ in remarks)


def of(tmp_path: Path, text: str, name: str = "task.yaml") -> Any:
    (tmp_path / name).write_text(text)
    return converted(tmp_path / name)


def test_a_skypilot_task_becomes_a_spec_that_load_reads(tmp_path: Path) -> None:
    (tmp_path / "sky.yaml").write_text(SKY)
    ran = run(str(tmp_path / "sky.yaml"), "-o", str(tmp_path / "job.yaml"))
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert f"lost: {tmp_path}/sky.yaml:13: resources.job_recovery" in ran.stderr
    spec = load(tmp_path / "job.yaml").spec
    assert spec.script is not None
    assert (spec.name, spec.script.code, spec.labels) == ("my-task", "./code", {"project": "x"})
    assert spec.script.image == "ubuntu:latest"
    assert spec.script.setup == ("pip install -r requirements.txt\n",)
    assert spec.script.command == ("bash", "-c", "python train.py --size ${MODEL_SIZE} --rank $SKYPILOT_NODE_RANK\n")
    limits = spec.resources
    assert (limits.providers, limits.regions, limits.accelerators) == (("aws",), ("us-east-1",), ("h100",))
    assert (limits.gpus, limits.nodes, limits.spot, limits.max_usd_per_hour) == (8, 2, "only", Decimal(80))
    assert limits.cpus == 4
    assert spec.env == {"MODEL_SIZE": "13b", "EPOCHS": "3", "LR": "1e-4", "VERSION": "1.10"}
    assert (spec.secrets, spec.retry.max) == (("HF_TOKEN",), 3)
    assert "my-secret-value" not in (tmp_path / "job.yaml").read_text() + ran.stderr
    lost = fields(converted(tmp_path / "sky.yaml").lost)
    assert lost == [
        "envs.BUCKET", "file_mounts./data", "resources.infra",
        "resources.job_recovery.max_restarts_on_errors", "resources.job_recovery.strategy", "run",
    ]  # fmt: skip


def test_a_dstack_task_becomes_a_spec_that_load_reads(tmp_path: Path) -> None:
    (tmp_path / ".dstack.yml").write_text(DSTACK)
    ran = run(str(tmp_path / ".dstack.yml"))
    assert ran.exit_code == 0
    (tmp_path / "job.yaml").write_text(ran.stdout)
    spec = load(tmp_path / "job.yaml").spec
    assert spec.script is not None
    assert spec.script.command == ("python", "train.py", "--epochs", "3")
    assert (spec.env, spec.secrets) == ({"LR": "1e-4"}, ("HF_TOKEN", "URL"))
    limits = spec.resources
    assert (limits.providers, limits.accelerators) == (("aws", "vast"), ("h100", "a100"))
    assert (limits.gpus, limits.nodes, limits.spot, limits.max_usd_per_hour) == (2, 2, "allowed", Decimal(20))
    assert (limits.disk_gb, spec.script.image) == (200, "ghcr.io/me/train:1")
    assert (spec.max_duration, spec.priority) == (6 * 3600, 3)
    assert spec.retry.on == ("no_capacity", "preempted", "lost", "infrastructure")
    assert spec.idle is not None
    assert (spec.idle.action, spec.idle.gpu_below, spec.idle.window_s) == ("end", 0.1, 1800)
    assert fields(converted(tmp_path / ".dstack.yml").lost) == [
        "backends", "env.OTHER", "python", "repos.1", "resources.gpu.count", "resources.gpu.memory",
        "retry.duration", "retry.on_events",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accelerators", "names", "gpus", "lost"),
    [
        ("V100", ["V100"], 1, []),
        ("[L4:1, H100:1]", ["L4", "H100"], 1, []),
        ("{A100:2, V100:2}", ["A100", "V100"], 2, []),
        ("{A100: 8}", ["A100"], 8, []),
        ("[L4:4, H100:1]", ["L4", "H100"], 1, ["resources.accelerators"]),
        ("L4:0.5", ["L4"], 1, ["resources.accelerators"]),
        ("{L4: 0.5}", ["L4"], 1, ["resources.accelerators"]),
    ],
)
def test_accelerators_of_skypilot_are_converted(
    tmp_path: Path, accelerators: str, names: list[str], gpus: int, lost: list[str]
) -> None:
    conversion = of(tmp_path, f"resources: {{accelerators: {accelerators}}}\nrun: python a.py\n")
    assert conversion.spec["resources"] == {"spot": "never", "accelerators": names, "gpus": gpus}
    assert fields(conversion.lost) == lost


@pytest.mark.parametrize(
    ("task", "least", "lost"),
    [
        ("resources: {cpus: 8, memory: 4x, disk_size: 1TB}\nrun: a\n", (8, 32, 1000), []),
        ("resources: {memory: 64+, disk_size: 256}\nrun: a\n", (None, 64, 256), []),
        (
            "resources: {memory: 2x, cpus: low, disk_size: -1}\nrun: a\n",
            (None, None, None), ["cpus", "disk_size", "memory"],
        ),
        ("type: task\ncommands: [a]\nresources: {cpu: 'x86:8..', memory: 32GB..64GB, disk: 500GB}\n", (8, 32, 500),
         ["memory"]),
        (
            "type: task\ncommands: [a]\nresources: {cpu: {arch: x86, count: {min: 4}}, memory: {min: 1TB}, "
            "disk: {size: 2TB.., type: ssd}}\n", (4, 1000, 2000), ["disk.type"],
        ),
        ("type: task\ncommands: [a]\nresources: {memory: ..64GB}\n", (None, None, None), ["memory"]),
    ],
)  # fmt: skip
def test_least_sizes_of_a_machine_are_kept(
    tmp_path: Path, task: str, least: tuple[int | None, ...], lost: list[str]
) -> None:
    conversion = of(tmp_path, task)
    limits = conversion.spec["resources"]
    assert tuple(limits.get(name) for name in ("cpus", "memory_gb", "disk_gb")) == least
    assert fields(conversion.lost) == [f"resources.{name}" for name in lost]


def test_alternatives_allow_each_place(tmp_path: Path) -> None:
    choices = "[{infra: aws/us-west-2, accelerators: H100}, {cloud: runpod, region: EU, disk_size: 9}, {infra: k8s}]"
    conversion = of(tmp_path, f"resources: {{ordered: {choices}}}\nrun: python a.py\nworkdir: {{url: x}}\n")
    assert conversion.spec["resources"] == {
        "spot": "never", "providers": ["aws", "runpod"], "regions": ["us-west-2", "EU"], "accelerators": ["H100"],
        "gpus": 1,
    }  # fmt: skip
    assert fields(conversion.lost) == [
        "resources.ordered", "resources.ordered", "resources.ordered", "resources.ordered.1.disk_size",
        "resources.ordered.2.infra", "workdir",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("resources", "meant", "lost"),
    [
        ("any_of: [{use_spot: true}, {use_spot: false}]", {"spot": "allowed"}, []),
        ("use_spot: true, any_of: [{use_spot: false}, {}]", {"spot": "allowed"}, []),
        ("any_of: [{use_spot: true}]", {"spot": "only"}, []),
        ("use_spot: true, any_of: [{use_spot: false}]", {"spot": "never"}, []),
        ("ordered: [{use_spot: true}, {use_spot: false}]", {"spot": "allowed"}, ["resources.ordered"]),
        ("any_of: [{use_spot: maybe}]", {"spot": "never"}, ["resources.any_of.0.use_spot"]),
        ("cloud: aws, any_of: [{cloud: runpod}]", {"spot": "never", "providers": ["runpod"]}, []),
        ("infra: aws, any_of: [{region: a}]", {"spot": "never", "providers": ["aws"], "regions": ["a"]}, []),
        (
            "any_of: [{cloud: aws, use_spot: true}, {cloud: runpod}]",
            {"spot": "allowed", "providers": ["aws", "runpod"]}, ["resources.any_of"],
        ),
        ("any_of: [{cloud: aws}, {}]", {"spot": "never", "providers": ["aws"]}, ["resources.any_of"]),
        ("any_of: [{cpus: 4, max_hourly_cost: 3}]", {"spot": "never"},
         ["resources.any_of.0.cpus", "resources.any_of.0.max_hourly_cost"]),
    ],
)  # fmt: skip
def test_no_setting_of_an_alternative_is_lost_silently(
    tmp_path: Path, resources: str, meant: dict[str, Any], lost: list[str]
) -> None:
    conversion = of(tmp_path, f"resources: {{{resources}}}\nrun: python a.py\n")
    assert conversion.spec["resources"] == meant
    assert fields(conversion.lost) == lost


@pytest.mark.parametrize(
    ("settings", "path", "meant", "lost"),
    [
        ("resources: {gpu: {count: {min: 2, max: 4}}}", "resources.gpus", 2, ["resources.gpu.count"]),
        ("resources: {gpu: {count: {min: 2, max: 2}}}", "resources.gpus", 2, []),
        ("resources: {gpu: {count: {max: 4}}}", "resources.gpus", 1, ["resources.gpu.count"]),
        ("resources: {gpu: '2..'}", "resources.gpus", 2, ["resources.gpu.count"]),
        ("resources: {gpu: {count: many}}", "resources.gpus", 1, ["resources.gpu.count"]),
        ("resources: {gpu: H100}", "resources.gpus", 1, []),
        ("retry: {duration: 1h}", "retry", None, ["retry.duration", "retry.on_events"]),
        ("retry: {on_events: [no-capacity, flood]}", "retry.on", ["no_capacity"], ["retry.on_events"]),
        ("max_price: 1.1\nnodes: 3", "resources.max_usd_per_hour", 3.3, []),
        ("max_price: 4", "resources.max_usd_per_hour", 4, []),
        ("spot_policy: maybe", "resources.spot", "never", ["spot_policy"]),
    ],
)
def test_values_of_dstack_keep_their_meaning(
    tmp_path: Path, settings: str, path: str, meant: Any, lost: list[str]
) -> None:
    conversion = of(tmp_path, f"type: task\ncommands: [python a.py]\n{settings}\n")
    value: Any = conversion.spec
    for key in path.split("."):
        value = value.get(key)
    assert value == meant
    assert fields(conversion.lost) == lost


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python a.py --name 'a b'", ["python", "a.py", "--name", "a b"]),
        ("cd x", None),
        ("python a.py | tee log", None),
        ("A=1 python a.py", None),
        ("python $X", None),
        ("python 'a", None),
        ("python a.py && echo", None),
        ("python a.py --files {a,b}.json", None),
        ("python a.py --files '{a,b}.json'", ["python", "a.py", "--files", "{a,b}.json"]),
    ],
)
def test_only_a_line_without_a_shell_becomes_words(tmp_path: Path, line: str, words: list[str] | None) -> None:
    command = of(tmp_path, f"run: {json.dumps(line)}\n").spec["script"]["command"]
    assert command == (["bash", "-c", f"{line}\n"] if words is None else words)


@pytest.mark.parametrize("name", ["train.yaml", "train.yml", "train.dstack.yml", "train.dstack.yaml"])
def test_a_task_without_a_name_has_the_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("type: task\ncommands: [python x.py]\n")
    assert converted(tmp_path / name).spec["name"] == "train"


def test_commands_of_dstack_stop_at_the_first_error(tmp_path: Path) -> None:
    conversion = of(
        tmp_path,
        "type: task\ncommands: [pip install x, 'echo $DSTACK_NODE_RANK']\nretry: false\nenv: {A: 1}\n"
        "resources: {gpu: {name: H100, count: 8, vendor: nvidia}}\n",
    )
    assert conversion.spec["script"]["command"] == ["bash", "-c", "set -e\npip install x\necho $DSTACK_NODE_RANK\n"]
    assert conversion.spec["retry"] == {"max": 0}
    assert (conversion.spec["resources"]["gpus"], conversion.spec["env"]) == (8, {"A": "1"})
    assert fields(conversion.lost) == ["commands"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type: service\ncommands: [a]\n", "task.yaml:1: type: service has no counterpart"),
        ("type: task\n", "commands: is missing"),
        ("resources: {cpus: 4}\n", "run: is missing"),
        ("a: 1\n", "is neither a task of SkyPilot"),
        ("run: a\nresources: [1]\n", "another form"),
        ("run: a\nnum_nodes: 99\n", "resources.nodes of the converted spec: must be less than or equal to 16"),
        ("run: a\n---\nrun: b\n", "not YAML"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        of(tmp_path, text)


def test_strict_writes_nothing_when_a_setting_is_lost(tmp_path: Path) -> None:
    (tmp_path / "sky.yaml").write_text(SKY)
    ran = run(str(tmp_path / "sky.yaml"), "--strict", "-o", str(tmp_path / "job.yaml"))
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "envs.BUCKET: has no value" in ran.stderr
    assert not (tmp_path / "job.yaml").exists()
    (tmp_path / "short.yaml").write_text("run: python a.py\n")
    assert run(str(tmp_path / "short.yaml"), "--strict").exit_code == 0


def test_json_has_the_spec_and_the_remarks(tmp_path: Path) -> None:
    (tmp_path / "sky.yaml").write_text(SKY)
    document = json.loads(run(str(tmp_path / "sky.yaml"), "--json").stdout)
    assert document["spec"]["name"] == "my-task"
    assert "file_mounts./data" in {remark["field"] for remark in document["lost"]}
    assert {remark["field"] for remark in document["hints"]} >= {"cap_usd", "secrets.HF_TOKEN"}


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "sky.yaml").write_text(SKY)
    assert run(str(tmp_path / "sky.yaml"), "-o", str(tmp_path / "sky.yaml")).exit_code == 2
    assert (tmp_path / "sky.yaml").read_text() == SKY
    assert run(str(tmp_path / "sky.yaml"), "-o", str(tmp_path / "no" / "job.yaml")).exit_code == 2
