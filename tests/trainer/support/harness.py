"""Real agents as processes over a folder as blob store: what the broker does, in a few lines."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from cryptography.fernet import Fernet

from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, DataFile, Desired, Final, Grant, Heartbeat, Limits, Manifest, Sealed

INSTALLATION = "inst"
JOB = "job1"
FAST = Limits(heartbeat_s=0.1, poll_s=0.1, log_s=0.1, deadman_s=0, outage_s=60, drain_s=300)


def until(fact: Callable[[], Any], what: str, seconds: float = 600.0) -> Any:
    """Wait until `fact` is true of another process; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := fact():
            return value
        time.sleep(0.005)
    raise AssertionError(f"never came true: {what}")


class Process(Protocol):
    """The part of `subprocess.Popen` that the harness uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Agent:
    """One started agent."""

    def __init__(self, bench: "Bench", attempt: str, process: Process) -> None:
        self.bench, self.attempt, self.process = bench, attempt, process

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(600)

    def wait(self, seconds: float = 600.0) -> Final:
        self.code = self.process.wait(seconds)
        return self.final

    @property
    def final(self) -> Final:
        return Final.model_validate_json(self.bench.path(keys.final(self.attempt)).read_bytes())

    @property
    def beat(self) -> Heartbeat | None:
        return self.beat_of(0)

    def beat_of(self, node: int) -> Heartbeat | None:
        path = self.bench.path(keys.heartbeat(self.attempt, node))
        return Heartbeat.model_validate_json(path.read_bytes()) if path.exists() else None

    @property
    def log(self) -> str:
        return self.log_of(0)

    def log_of(self, node: int) -> str:
        folder = self.bench.path(keys.logs(self.attempt)) / str(node)
        chunks = sorted(p for p in folder.glob("*") if "#" not in p.name) if folder.exists() else []
        return "".join(p.read_text() for p in chunks)

    def desire(self, want: Any, seq: int = 1) -> None:
        self.bench.put(keys.desired(self.attempt), Desired(want=want, seq=seq, reason=f"test wants {want}"))


class Bench:
    """A blob store in a folder, and the agents on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "store"
        self.root.mkdir(parents=True)
        self.key = Fernet.generate_key().decode()
        self.env: dict[str, str] = {}
        """More variables of agents started from now on."""
        self.module = "trainer"
        """Name of the module that runs as the agent."""
        self._agents: list[Agent] = []
        self._number = 0

    def path(self, key: str) -> Path:
        return self.root / INSTALLATION / key

    def put(self, key: str, value: Any) -> None:
        """Write an object atomically, as a blob store does."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = value if isinstance(value, bytes) else value.model_dump_json().encode()
        temporary = path.with_name(path.name + "#tmp")
        temporary.write_bytes(data)
        temporary.replace(path)

    def data(self, content: bytes, fmt: Any) -> DataFile:
        sha256 = hashlib.sha256(content).hexdigest()
        self.put(keys.job_data(JOB, sha256), content)
        return DataFile(key=keys.job_data(JOB, sha256), sha256=sha256, bytes=len(content), format=fmt)

    def code(self, **files: str) -> DataFile:
        """Return a tar of files, as the CLI packs them; `main` becomes main.py."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(f"{name}.py")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
        return self.data(buffer.getvalue(), "tar")

    def seal(self, attempt: str, secrets: dict[str, str]) -> None:
        sealed = Fernet(self.key).encrypt(Sealed(secrets=secrets).model_dump_json().encode()).decode()
        self.put(keys.grant(attempt), Grant(sealed=sealed))

    def start(
        self, *, want: Any = None, secrets: dict[str, str] | None = None, names: tuple[str, ...] = (), **spec: Any
    ) -> Agent:
        """Start the next attempt's agent in a group of its own; it resumes from all that is committed."""
        self._number += 1
        attempt = f"a{self._number:03d}"
        fields = {"limits": FAST, "resume_from": tuple(m for m, _ in self.committed()), **spec}
        names = names or tuple(secrets or ())
        self.put(
            keys.spec(attempt),
            AttemptSpec(
                installation=INSTALLATION, job=JOB, attempt=attempt, number=self._number, secrets=names, **fields
            ),
        )
        if secrets is not None:
            self.seal(attempt, secrets)
        if want is not None:
            self.put(keys.desired(attempt), Desired(want=want, seq=1, reason=f"test wants {want}"))
        return self._spawn(attempt)

    def restart(self, agent: Agent) -> Agent:
        """Return a second agent for the same attempt, as when a container starts again."""
        return self._spawn(agent.attempt)

    def beside(self, agent: Agent) -> Agent:
        """Return the agent of the same attempt's second machine."""
        workdir = self.folder / "work" / f"{agent.attempt}-second"
        kept = self.env
        self.env = {**kept, "GPUBROKER_NODE": "1", "GPUBROKER_WORKDIR": str(workdir)}
        try:
            return self._spawn(agent.attempt)
        finally:
            self.env = kept

    def _spawn(self, attempt: str) -> Agent:
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GPUBROKER_")},
            "GPUBROKER_BLOBS": self.root.as_uri(),
            "GPUBROKER_INSTALLATION": INSTALLATION,
            "GPUBROKER_ATTEMPT": attempt,
            "GPUBROKER_ATTEMPT_KEY": self.key,
            "GPUBROKER_WORKDIR": str(self.folder / "work" / attempt),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.env,
        }
        argv = [sys.executable, "-m", self.module]
        process = subprocess.Popen(argv, env=env, start_new_session=True, stdin=subprocess.DEVNULL)
        agent = Agent(self, attempt, process)
        self._agents.append(agent)
        return agent

    def committed(self) -> list[tuple[str, Manifest]]:
        """Return (key, manifest) of every committed checkpoint, the furthest first."""
        paths = self.path(keys.checkpoints(JOB)).glob(f"*/*/{keys.MANIFEST}")
        listed = keys.manifests(p.relative_to(self.root / INSTALLATION).as_posix() for p in paths)
        found = [(key, Manifest.model_validate_json(self.path(key).read_bytes())) for key in listed]
        return sorted(found, key=lambda f: (f[1].step, f[0]), reverse=True)

    def files(self, manifest: str) -> Path:
        """Return the folder of what a checkpoint holds."""
        return self.path(keys.files_prefix(manifest))

    def torn(self, attempt: str) -> list[Path]:
        """Return folders of checkpoints that are being written."""
        folder = self.path(keys.checkpoints(JOB)) / attempt
        if not folder.exists():
            return []
        return [p for p in folder.iterdir() if not (p / keys.MANIFEST).exists()]

    def metrics(self, manifest: str) -> list[dict[str, Any]]:
        text = (self.files(manifest) / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.kill_group()


def alive(pid: int) -> bool:
    """Return True while the process runs; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it went before the file was opened, or read
        return False


def group_members(group: int) -> Iterator[int]:
    """Yield living processes of a process group."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                if os.getpgid(int(entry.name)) == group:
                    yield int(entry.name)
            except ProcessLookupError:
                continue
