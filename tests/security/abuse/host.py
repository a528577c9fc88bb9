"""Attacks on the daemon's host: code that runs as the daemon's user, and probes of its folders."""

import io
import tarfile

from tests.security.abuse.registry import attack
from tests.security.abuse.target import Target, repeated

FOLDERS = ("/root", "/nonexistent", "~root", "/etc/ssl/private", "./x")


def _archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("x.py"), io.BytesIO())
    return file.getvalue()


@attack
async def scripts_on_the_daemons_host(target: Target, seconds: float) -> None:
    """Submit a script that would run as the daemon's user, who can read the daemon's keys."""
    _, upload = await target.upload(_archive(), "x.tar")
    script = {"code": upload["ref"], "command": ["python3", "x.py"], "checkpoints": False}
    spec = {"name": "x", "cap_usd": "1", "script": script, "resources": {"providers": ["local"]}}

    async def submit() -> None:
        status, answer = await target.call("POST", "/v1/jobs", target.attacker, json=spec)
        assert status in (422, 429), answer
        assert status == 429 or "providers.local.teams" in str(answer), answer

    await repeated(seconds, submit)


@attack
async def quotes_that_probe_folders(target: Target, seconds: float) -> None:
    """Probe for folders by quotes, whose answers must not differ for a folder that exists."""
    _, upload = await target.upload(b"word,definition\n" + b"a,b\n" * 40, "words.csv")
    data = {"path": upload["ref"], "prompt": "{word}", "completion": "{definition}"}

    async def probe() -> None:
        answers = set()
        for model in FOLDERS:
            spec = {"name": "p", "cap_usd": "1", "train": {"model": model, "data": data}}
            status, answer = await target.call("POST", "/v1/quotes", target.attacker, json=spec)
            if status != 429:
                answers.add((status, str(answer["detail"])))
        assert len(answers) <= 1, answers

    await repeated(seconds, probe)
