"""Scripts of a rented machine: two constant texts, executed here for real in mount namespaces of their own."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest

from broker.daemon.trainer_bundle import bundle
from broker.domain.instance import BootSpec, TrainerBundle, TrainerImage
from providers.common.machine_task import CUDA_FLOOR, STOCK_IMAGE, STOCK_IMAGE_CUDA, MachineTask, registry_of, task_of
from providers.runpod.provider import RunpodConfig
from providers.vast.provider import VastConfig
from tests.trainer.support.harness import INSTALLATION, JOB, Bench
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, Final, Outcome
from trainer.contract.script import ScriptConfig

IMAGE = "registry.example:5000/team/trainer@sha256:" + "a" * 64
KEY, STORE, PASSWORD = "attempt-key-value", '{"aws_secret_access_key": "store-secret"}', "registry-password"
SECRETS = (KEY, "store-secret", PASSWORD)
ENV = {"GPUBROKER_BLOBS": "s3://bucket/x", "GPUBROKER_INSTALLATION": "k3x9", "GPUBROKER_ATTEMPT": "$(touch /tmp/x)"}
SECRET_ENV = {"GPUBROKER_ATTEMPT_KEY": KEY, "GPUBROKER_STORE_OPTIONS": STORE}
RECORDER = """#!/bin/bash
{ printf '%s\\0' "$@"; } >>"$RECORD/argv"; printf '\\n' >>"$RECORD/argv"
case "$*" in
    *"login "* | *"run "*) cat >>"$RECORD/stdin" ;;
    *"pull "*) [ -n "${PULL_FAILS:-}" ] && exit 1 ;;
esac
case "$*" in *"run "*) exit "${CODE:-0}" ;; esac
exit 0
"""
PYTHON = """#!/bin/bash
{ id -u; id -g; id -G; pwd; grep NoNewPrivs /proc/self/status; stat -c %a:%u . "$GPUBROKER_WORKDIR"; } >"$PWD/facts"
env -0 >"$PWD/environment"
printf '%s\\n' "$@" >"$PWD/argv"
exit "${GPUBROKER_TEST_CODE:-0}"
"""


def boot(trainer: TrainerImage | TrainerBundle | None, **env: str) -> BootSpec:
    return BootSpec(env={**ENV, **env}, secret_env=SECRET_ENV, trainer=trainer, nodes=2)


PRIVATE = TrainerImage(reference=IMAGE, username="robot", password=PASSWORD)
PUBLIC = TrainerImage(reference=IMAGE)
BUNDLE = TrainerBundle(url="https://bucket.example/trainer?signature=s1gned", sha256="b" * 64)


def test_the_texts_are_the_same_for_all() -> None:
    tasks = [task_of(boot(t), docker_run=d) for t in (PRIVATE, PUBLIC, BUNDLE) for d in (True, False)]
    assert len({(t.setup, t.run) for t in tasks}) == 1
    assert not any(value in tasks[0].setup + tasks[0].run for value in (*SECRETS, *ENV.values(), IMAGE))
    assert all(t.nodes == 2 for t in tasks)


def test_an_image_is_the_machine_where_the_cloud_takes_images() -> None:
    task = task_of(boot(PRIVATE), docker_run=False)
    assert task.image == f"docker:{IMAGE}"
    assert task.registry_login == ("registry.example:5000", "robot", PASSWORD)
    assert PASSWORD not in (task.env | task.secrets).values()
    assert task_of(boot(PUBLIC), docker_run=False).registry_login is None


def test_an_image_is_run_on_a_plain_machine() -> None:
    task = task_of(boot(PRIVATE), docker_run=True)
    assert (task.image, task.registry_login) == (None, None)
    assert task.env["GPUBROKER_REGISTRY_SERVER"] == "registry.example:5000"
    assert task.secrets["GPUBROKER_REGISTRY_PASSWORD"] == PASSWORD


def test_without_an_image_the_bundle_goes_onto_the_stock_one() -> None:
    task = task_of(boot(BUNDLE), docker_run=False)
    assert task.image == f"docker:{STOCK_IMAGE}"
    assert re.fullmatch(r"[a-z./]+@sha256:[0-9a-f]{64}", STOCK_IMAGE), "a tag may move"
    assert task.secrets["GPUBROKER_BUNDLE_URL"] == BUNDLE.url
    assert task_of(boot(BUNDLE), docker_run=True).image is None


def test_the_image_of_a_job_gets_the_bundle() -> None:
    task = task_of(replace(boot(BUNDLE), image="pytorch/pytorch:2.9.0"), docker_run=False)
    assert (task.image, task.env["GPUBROKER_WAY"]) == ("docker:pytorch/pytorch:2.9.0", "bundle")


def test_the_driver_floor_runs_the_stock_image_and_is_every_clouds_default() -> None:
    """CUDA's minor version compatibility holds within a major version."""
    assert CUDA_FLOOR.split(".")[0] == STOCK_IMAGE_CUDA.split(".")[0]
    assert RunpodConfig().cuda_min == VastConfig().cuda_min == CUDA_FLOOR


def test_secrets_are_not_shown_and_no_machine_goes_without_a_trainer() -> None:
    for trainer in (PRIVATE, BUNDLE):
        shown = repr(task_of(boot(trainer), docker_run=True))
        assert not any(secret in shown for secret in (*SECRETS, "s1gned"))
    with pytest.raises(ValueError, match="no trainer"):
        task_of(boot(None), docker_run=False)


@pytest.mark.parametrize(
    ("reference", "server"),
    [
        ("ghcr.io/o/n@sha256:1", "ghcr.io"),
        ("localhost/n@sha256:1", "localhost"),
        ("host:5000/n@sha256:1", "host:5000"),
        ("team/n@sha256:1", "docker.io"),
        ("n@sha256:1", "docker.io"),
    ],
)
def test_the_registry_of_an_image_is_read_from_its_name(reference: str, server: str) -> None:
    assert registry_of(reference) == server


# ------------------------------------------------------------------------------------------------- executed for real


class Machine:
    """/srv, /var/tmp, /etc and the programs in front of PATH are this test's own."""

    def __init__(self, folder: Path) -> None:
        self.srv, self.var, self.etc = folder / "srv", folder / "var", folder / "etc"
        self.bin, self.record = self.srv / "bin", self.var / "record"
        for path in (self.srv, self.var, self.bin, self.record):
            path.mkdir()
        for path in (self.var, self.record):
            path.chmod(0o1777)
        subprocess.run(["cp", "-a", "/etc", self.etc], check=True)
        self.script = Path("/tmp") / f"sky_test_{os.getpid()}_{id(self)}"
        self.program("docker", RECORDER)
        self.program("systemctl", "#!/bin/bash\n")
        self.program("shutdown", '#!/bin/bash\necho "shutdown $*" >>"$RECORD/argv"\n')

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def do(
        self, text: str, task: MachineTask, *, uid: int = 0, env: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        """Run a text with the variables of its task."""
        values = {**task.env, **task.secrets, **env, "RECORD": "/var/tmp/record"}
        lines = [f"export {name}='{value}'" for name, value in values.items()]
        self.script.write_text("\n".join(["#!/bin/bash", *lines, text, ""]))
        self.script.chmod(0o600)
        os.chown(self.script, uid, uid)
        user = f"setpriv --reuid {uid} --regid {uid} --clear-groups" if uid else ""
        own = ((self.srv, "/srv"), (self.var, "/var/tmp"), (self.etc, "/etc"))
        mounts = " ".join(f"mount --bind {folder} {place} &&" for folder, place in own) + open_python()
        inside = f"{mounts} exec {user} bash {self.script}"
        try:
            return subprocess.run(
                ["unshare", "--mount", "--propagation", "private", "bash", "-c", inside],
                env={"PATH": "/srv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/var/tmp"},
                cwd="/",
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            self.script.unlink(missing_ok=True)

    @property
    def argv(self) -> str:
        path = self.record / "argv"
        return path.read_text().replace("\0", " ") if path.exists() else ""

    @property
    def stdin(self) -> str:
        return (self.record / "stdin").read_text()

    @property
    def work(self) -> Path:
        return self.var / "gpubroker"


def open_python() -> str:
    """Return shell text for a mount namespace that lets every user reach this Python in a private home."""
    base = Path(sys.base_prefix)
    closed = next((p for p in reversed(base.parents) if not p.stat().st_mode & 0o001), None)
    if closed is None:
        return ""
    hold = f"mkdir -p /var/tmp/base && mount --bind {base} /var/tmp/base && mount -t tmpfs -o mode=755 tmpfs {closed}"
    return f"{hold} && mkdir -p {base} && mount --bind /var/tmp/base {base} &&"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    can = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if os.getuid() or can.returncode:
        pytest.skip("needs root and mount namespaces, to keep /srv and /var/tmp of this machine out of it")
    return Machine(tmp_path)


def test_both_texts_are_bash() -> None:
    task = task_of(boot(PUBLIC), docker_run=True)
    for text in (task.setup, task.run):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_setup_pulls_with_the_login_on_stdin(machine: Machine) -> None:
    task = task_of(boot(PRIVATE), docker_run=True)
    for _ in range(2):
        done = machine.do(task.setup, task)
        assert done.returncode == 0, done.stderr
    assert f"pull --quiet {IMAGE}" in machine.argv
    assert "login --username robot --password-stdin registry.example:5000" in machine.argv
    assert machine.stdin == PASSWORD * 2
    assert not any(secret in machine.argv + done.stdout + done.stderr for secret in SECRETS)
    folder = re.findall(r"--config (\S+)", machine.argv)
    assert folder
    assert not any(Path(path).exists() for path in folder), "the login does not stay"


def test_setup_logs_in_nowhere_for_a_public_image(machine: Machine) -> None:
    task = task_of(boot(PUBLIC), docker_run=True)
    assert machine.do(task.setup, task).returncode == 0
    assert "login" not in machine.argv


def test_setup_fails_where_the_image_cannot_be_pulled(machine: Machine) -> None:
    task = task_of(boot(PUBLIC), docker_run=True)
    done = machine.do(task.setup, task, env={"PULL_FAILS": "1"})
    assert done.returncode == 1
    assert f"gpubroker-setup: cannot pull {IMAGE}; check trainer.image" in done.stderr
    assert machine.argv.count("pull") == 3


def test_setup_of_an_image_wants_the_trainer_in_it(machine: Machine) -> None:
    task = task_of(boot(PUBLIC), docker_run=False)
    done = machine.do(task.setup, task)
    assert done.returncode == 1
    assert "no trainer in this image" in done.stderr


def test_run_gives_the_container_its_variables_in_no_argument_and_no_file(machine: Machine) -> None:
    task = task_of(boot(PRIVATE), docker_run=True)
    nodes = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2"}
    done = machine.do(task.run, task, env=nodes)
    assert done.returncode == 0, done.stderr
    assert not any(secret in machine.argv + done.stdout + done.stderr for secret in SECRETS)
    for words in (
        "--gpus all --ipc host --network host",
        "--user 1000:1000",
        "--env-file /dev/stdin",
        f"{IMAGE} /srv/venv/bin/python -m trainer",
    ):
        assert words in machine.argv
    given = dict(line.split("=", 1) for line in machine.stdin.splitlines())
    assert {**ENV, **SECRET_ENV}.items() <= given.items()
    assert (given["GPUBROKER_NODE"], given["GPUBROKER_MASTER"]) == ("1", "10.0.0.4:29400")
    assert json.loads(given["GPUBROKER_STORE_OPTIONS"])
    assert given["HF_HOME"].startswith(given["HOME"] + "/"), "uid 1000 has no home of its own in a container"
    assert not any("REGISTRY" in name for name in given)
    assert not any(KEY.encode() in p.read_bytes() for p in machine.work.rglob("*") if p.is_file())
    assert machine.work.stat().st_uid == 1000


@pytest.mark.parametrize(("code", "seen"), [("0", 0), ("70", 0), ("64", 0), ("75", 0), ("137", 137), ("125", 125)])
def test_run_fails_to_skypilot_only_if_the_trainer_could_not_run(machine: Machine, code: str, seen: int) -> None:
    task = task_of(boot(PUBLIC), docker_run=True)
    assert machine.do(task.run, task, env={"CODE": code}).returncode == seen
    assert "shutdown" not in machine.argv


def here(machine: Machine, python: str = PYTHON, **env: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run the image that is the machine; return the result and the trainer's environment."""
    path = machine.srv / "venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(python)
    path.chmod(0o755)
    task = task_of(boot(PUBLIC), docker_run=False)
    assert machine.do(task.setup, task).returncode == 0
    done = machine.do(task.run, task, env=env)
    pairs = (machine.work / "environment").read_text().rstrip("\0").split("\0")
    return done, dict(pair.split("=", 1) for pair in pairs)


def test_run_drops_root(machine: Machine) -> None:
    foreign = {"RUNPOD_API_KEY": "cloud", "CONTAINER_API_KEY": "cloud", "SKYPILOT_DOCKER_PASSWORD": PASSWORD}
    done, given = here(machine, **foreign)
    assert done.returncode == 0, done.stderr
    facts = (machine.work / "facts").read_text().split()
    assert facts[:4] == ["1000", "1000", "1000", "/var/tmp/gpubroker"]
    assert facts[4:] == ["NoNewPrivs:", "1", "700:1000", "700:1000"]
    assert (machine.work / "argv").read_text().split() == ["-m", "trainer"]
    assert {**ENV, **SECRET_ENV}.items() <= given.items()
    assert not given.keys() & foreign.keys(), "the clouds' keys stay with root"
    assert (given["GPUBROKER_NODE"], given["GPUBROKER_MASTER"]) == ("0", "127.0.0.1:29400")
    assert given["HOME"].startswith("/var/tmp/gpubroker/")


def test_run_passes_on_that_the_trainer_was_killed(machine: Machine) -> None:
    done, _ = here(machine, GPUBROKER_TEST_CODE="137")
    assert done.returncode == 137


def test_sudo_gets_variable_names_without_values(machine: Machine) -> None:
    machine.program("sudo", RECORDER)
    task = task_of(boot(PUBLIC), docker_run=False)
    done = machine.do(task.run, task, uid=4242)
    assert done.returncode == 0, done.stderr
    assert "--reuid 10001 --regid 10001 --clear-groups --no-new-privs" in machine.argv
    assert not any(secret in machine.argv for secret in SECRETS)
    names = re.findall(r"--preserve-env=(\S+)", machine.argv)[0].split(",")
    assert {*ENV, *SECRET_ENV, "HOME"} <= set(names)


# ---------------------------------------------------------------------------------------------------------- the bundle


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield (URL, folder) of a server on loopback."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def bundle_task(served: tuple[str, Path], data: bytes, promised: bytes | None = None) -> MachineTask:
    url, folder = served
    (folder / "trainer.tar").write_bytes(data)
    name = sha256(promised or data).hexdigest()
    return task_of(boot(TrainerBundle(url=f"{url}/trainer.tar?s1gned", sha256=name)), docker_run=True)


NOTHING_TO_FETCH: Mapping[str, str] = {"PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9"}


def test_the_bundle_is_installed_next_to_the_torch_that_is_there(machine: Machine, served: tuple[str, Path]) -> None:
    task = bundle_task(served, bundle())
    done = machine.do(task.setup, task, env=NOTHING_TO_FETCH)
    assert done.returncode == 0, done.stderr
    assert "trainer ready: torch" in done.stdout
    assert "s1gned" not in done.stdout + done.stderr
    (served[1] / "trainer.tar").unlink()
    again = machine.do(task.setup, task, env=NOTHING_TO_FETCH)
    assert again.returncode == 0, again.stderr
    python = machine.srv / "venv" / "bin" / "python"
    completed = subprocess.run([python, "-m", "trainer"], cwd="/", env={}, capture_output=True, text=True, check=False)
    assert (completed.returncode, "GPUBROKER_BLOBS is not set" in completed.stderr) == (64, True)


NOSY = """
import os
try:
    print("the agent's environment:", len(open(f"/proc/{os.getppid()}/environ").read()))
except PermissionError:
    print("the agent's environment is closed to user", os.getuid())
"""


def test_the_real_trainer_runs_a_program_that_cannot_read_its_keys(machine: Machine, served: tuple[str, Path]) -> None:
    bench = Bench(machine.var)
    config = ScriptConfig(code="upload:x", command=("/srv/venv/bin/python", "main.py"))
    spec = AttemptSpec(
        installation=INSTALLATION, job=JOB, attempt="a001", number=1, script=config, code=bench.code(main=NOSY)
    )
    bench.put(keys.spec("a001"), spec)
    subprocess.run(["chown", "-R", "1000:1000", bench.root], check=True)
    where = {"GPUBROKER_BLOBS": "file:///var/tmp/store", "GPUBROKER_INSTALLATION": INSTALLATION}
    task = bundle_task(served, bundle())
    assert machine.do(task.setup, task, env=NOTHING_TO_FETCH).returncode == 0
    done = machine.do(task.run, task, env={**where, "GPUBROKER_ATTEMPT": "a001", "GPUBROKER_ATTEMPT_KEY": bench.key})
    assert done.returncode == 0, done.stderr
    final = Final.model_validate_json(bench.path(keys.final("a001")).read_bytes())
    assert final.outcome is Outcome.COMPLETED, final.message
    log = b"".join(p.read_bytes() for p in bench.path(keys.logs("a001")).rglob("*") if p.is_file())
    assert b"closed to user 1000" in log


def test_a_bundle_that_was_altered_is_not_installed(machine: Machine, served: tuple[str, Path]) -> None:
    hasty = "import sys, time; time.sleep = lambda s: None; sys.argv.pop(0); exec(sys.stdin.read())"
    machine.program("python3", f'#!/bin/bash\nexec {sys.executable} -c "{hasty}" "$@"\n')
    task = bundle_task(served, b"something else", promised=b"the trainer")
    done = machine.do(task.setup, task)
    assert done.returncode == 1
    assert "not the one that was uploaded" in done.stderr
    assert not list(machine.srv.rglob("deploy"))
