"""The daemon of the benchmark of short commands holds the jobs that `gpubroker ls` lists."""

import json
from pathlib import Path

from benchmarks.cli_start import JOBS, daemon
from broker.client.sync_client import Client


def test_the_daemon_that_ls_asks_has_its_queued_jobs(tmp_path: Path) -> None:
    with daemon(tmp_path / "home") as environment:
        address = json.loads((Path(environment["GPUBROKER_HOME"]) / "client.json").read_text())
        with Client(address["url"], address["token"]) as client:
            states = [job.state for job in client.jobs().items]
    assert states == ["queued"] * JOBS
