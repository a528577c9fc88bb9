"""A job in several attempts: its results, and the final report of each attempt."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.support import tiny_jobs
from tests.trainer.support.harness import until
from tests.trainer.support.tiny_jobs import KINDS, STEPS
from tests.trainer.support.warm_machines import WarmBench, micro
from trainer.contract.documents import Final, Outcome
from trainer.contract.train import TrainConfig

KIND = KINDS["causal_lm full"]
ELSEWHERE = "8 x NVIDIA H100 80GB HBM3 (ddp, torch 2.1.0)"
WEIGHTS = 4 * 200 * 32
"""Bytes of the embeddings alone."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[WarmBench]:
    made = WarmBench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def train(tmp_path: Path) -> TrainConfig:
    return TrainConfig.model_validate({**tiny_jobs.train(KIND, tmp_path / "model").model_dump(), "samples": {}})


def ended(bench: WarmBench, train: TrainConfig, at: tuple[int, int] | None = None) -> Final:
    """Return an attempt that is drained before a micro-batch, or comes to its end."""
    bench.at, bench.how = (micro(*at), "drain") if at else (None, "machine")
    agent = bench.start(train=train, data=bench.data(tiny_jobs.data(KIND), KIND.format))
    final = agent.wait()
    assert final.outcome is (Outcome.DRAINED if at else Outcome.COMPLETED), agent.log
    return final


def test_the_card_says_which_attempt_did_which_steps_on_which_data(bench: WarmBench, train: TrainConfig) -> None:
    ended(bench, train, at=(3, 1))
    ended(bench, train, at=(8, 2))
    ended(bench, train)
    key, manifest = bench.committed()[0]
    assert manifest.complete
    card = (bench.files(key) / "README.md").read_text()
    attempts = card.split("## Attempts")[1].split("##")[0].strip().splitlines()
    assert attempts[2:] == ["| 1 | 1 to 3 |", "| 2 | 4 to 8 |", f"| 3 | 9 to {STEPS} |"]
    assert f"| data, sha256 | {hashlib.sha256(tiny_jobs.data(KIND)).hexdigest()} |" in card


def test_the_final_report_has_the_peak_and_speed_of_its_own_steps(bench: WarmBench, train: TrainConfig) -> None:
    final = ended(bench, train)
    rows = bench.metrics(bench.committed()[0][0])
    speeds = [row["tokens"] / row["seconds"] for row in rows]
    assert final.tokens_per_s is not None
    assert min(speeds) * 0.9 < final.tokens_per_s < max(speeds) * 1.1
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert final.peak_memory_bytes is not None
    assert WEIGHTS < final.peak_memory_bytes < memory


def test_another_device_or_version_is_allowed_and_reported(bench: WarmBench, train: TrainConfig) -> None:
    first = ended(bench, train, at=(3, 1))
    assert "moved" not in {message.kind for message in first.messages}
    key, manifest = bench.committed()[0]
    state = bench.files(key) / "state.json"
    document = json.loads(state.read_text())
    here, document["environment"] = document["environment"], ELSEWHERE
    state.write_text(json.dumps(document))
    content = state.read_bytes()
    changed = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    files = tuple(f.model_copy(update=changed) if f.path == "state.json" else f for f in manifest.files)
    bench.put(key, manifest.model_copy(update={"files": files}))
    last = ended(bench, train)
    assert last.resumed_from == 3
    (moved,) = [message.message for message in last.messages if message.kind == "moved"]
    assert moved.startswith(f"the checkpoint was made on {ELSEWHERE}, this is {here}: the data continues exactly")
    assert [row["step"] for row in bench.metrics(bench.committed()[0][0])] == list(range(1, STEPS + 1))


def test_an_end_during_publishing_reports_the_delivered_results(bench: WarmBench, train: TrainConfig) -> None:
    """The destination never answers, and the agent would retry for more than half a minute."""
    nowhere = {"aws_endpoint": "http://127.0.0.1:9", "aws_access_key_id": "x", "aws_secret_access_key": "x"}
    output = {"copy_to": {"url": "s3://bucket", "secret": "S3"}}
    agent = bench.start(
        train=TrainConfig.model_validate({**train.model_dump(), "output": output}),
        data=bench.data(tiny_jobs.data(KIND), KIND.format),
        secrets={"S3": json.dumps(nowhere)},
    )
    until((bench.folder / "work" / agent.attempt / "results").exists, "results on their way")
    agent.desire("stop")
    final = agent.wait()
    assert final.outcome is Outcome.COMPLETED, agent.log
    assert "the results were not published in time. The results are safe: fetch them" in final.message
