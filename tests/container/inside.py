"""Checks of `tests.container` inside the image: `python -m tests.container.inside FOLDER`."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.clouds.bake import NoBake, enclosed
from tests.container.image import Failed, Store
from tests.trainer.support.tiny_models import llama

STEPS = 6
USER = ("/usr/bin/setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs")
Run = Callable[..., str]


def look(run: Run) -> None:
    """Check the programs that SkyPilot and the clouds' start-up require, and that no secret of the build machine is
    there.
    """
    script = """
    set -e
    [ "$(id -u)" = 0 ] && [ "$(id -u gpubroker)" = 1000 ]
    for program in sshd rsync curl patch sudo nc gcc; do command -v $program >/dev/null || echo "no $program"; done
    ls /etc/ssh/ssh_host_* /var/lib/apt/lists/*Packages* 2>/dev/null || true
    if [ -s /etc/pip.conf ]; then echo "pip.conf of where it was built"; fi
    python -c 'import accelerate, bitsandbytes, diffusers, mlflow, peft, torch, transformers, wandb' || echo incomplete
    """
    said = run("bash", "-c", script)
    if said.strip():
        raise Failed(f"the image is not as it should be: {said.strip()}")


def notice(run: Run) -> None:
    """Send SIGTERM to the first process, as RunPod does 5 s before a pod's end."""
    told = "while ! cat /run/gpubroker-notice 2>/dev/null; do :; done"
    said = run("sh", "-c", f"trap '' TERM; kill -TERM 1; {told}")
    if float(said.strip()) != 5.0:
        raise Failed(f"the notice says {said!r}, not how long the container has to live")


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Run the agent as the unprivileged user of a machine's set-up, up to a checkpoint."""
    llama(folder / "model")
    rows = "".join(f"w{i % 90},w{i % 70} w{i % 50}\n" for i in range(64))
    (folder / "rows.csv").write_text("q,a\n" + rows)
    data = {"path": "rows.csv", "prompt": "{q} ", "completion": "{a}"}
    job = {"train": {"model": "/job/model", "data": data, "max_length": 16, "global_batch": 4, "max_steps": STEPS}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    run(*USER, "/srv/venv/bin/python", "-m", "trainer", "--config", "/job/job.yaml", "--output", "/job/out")
    (final,) = (folder / "out").glob("store/**/final.json")
    told: dict[str, Any] = json.loads(final.read_text())
    if told["outcome"] != "completed" or told["step"] != STEPS:
        raise Failed(f"the training ended otherwise: {told}")
    return told


def check(store: Store) -> Mapping[str, object]:
    started = time.monotonic()
    base = store.make_base()
    print(f"base by debootstrap: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    image = store.build(base)
    built = time.monotonic() - started
    print(f"image built: {built:.0f} s", file=sys.stderr, flush=True)
    config, root, job = store.config(image), store.mount(image), store.folder / "job"
    env = dict(word.split("=", 1) for word in config["Env"]) | {"HOME": "/root", "HF_HUB_OFFLINE": "1"}
    entry = config["Entrypoint"]
    if config["Cmd"] != ["python", "-m", "trainer"] or entry[0] != "/srv/venv/bin/python":
        raise Failed(f"the image starts {entry} with {config['Cmd']}")

    def run(*argv: str) -> str:
        return enclosed(root, [*entry, *argv], env, {"/job": (job, False)})

    job.mkdir()
    look(run)
    notice(run)
    final = train(run, job)
    size = sum(path.lstat().st_blocks * 512 for path in root.rglob("*"))
    took = time.monotonic() - started
    return {"image_bytes": size, "built_s": round(built), "steps": final["step"], "seconds": round(took)}


def main() -> int:
    try:
        print(json.dumps(check(Store(Path(sys.argv[1])))))
    except (Failed, NoBake) as e:
        print(f"container: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
