"""Sample scope and moment of the credential tests."""

from datetime import UTC, datetime

from broker.blobs.credentials.scope import Scope
from broker.domain.ids import AttemptId, JobId

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
JOB, ATTEMPT, ORIGIN = JobId("j" * 13), AttemptId("a" * 13), JobId("o" * 13)
SCOPE = Scope(bucket="training", root="team/abcd/", job=JOB, attempt=ATTEMPT, origin=ORIGIN)
READS = [
    f"team/abcd/data/{JOB}.", f"team/abcd/checkpoints/{JOB}/", f"team/abcd/checkpoints/{ORIGIN}/",
    f"team/abcd/attempts/{ATTEMPT}/",
]  # fmt: skip
WRITES = [
    f"team/abcd/heartbeats/{ATTEMPT}/", f"team/abcd/attempts/{ATTEMPT}/log/", f"team/abcd/checkpoints/{JOB}/{ATTEMPT}/",
]  # fmt: skip
LEASE, FINAL = "team/abcd/broker/lease", f"team/abcd/attempts/{ATTEMPT}/final.json"


def now() -> datetime:
    return NOW
