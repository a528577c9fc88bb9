"""Ids of new jobs."""

import os

from broker.domain.ids import DRAWN_AT_ONCE, ID_LENGTH, JOB_ENTROPY, JobIds, base32, job_id
from tests.support.machines import spec


def test_ids_of_jobs_use_every_random_byte_once() -> None:
    drawn: list[bytes] = []

    def entropy(count: int) -> bytes:
        drawn.append(os.urandom(count))
        return drawn[-1]

    ids = JobIds(entropy)
    made = [ids.new() for _ in range(2 * DRAWN_AT_ONCE)]
    data = b"".join(drawn)
    parts = [data[first : first + JOB_ENTROPY] for first in range(0, len(data), JOB_ENTROPY)]
    assert len(drawn) == 2
    assert sorted(made) == sorted(map(job_id, parts))
    assert len(set(made)) == len(made)


def test_base32_reads_the_first_bytes_only() -> None:
    assert base32(b"\x00" * 9, ID_LENGTH) == "a" * ID_LENGTH
    assert base32(b"\xff" * 9 + b"rest", ID_LENGTH) == base32(b"\xff" * 9, ID_LENGTH) == "7" * ID_LENGTH


def test_a_spec_with_the_same_training_config_is_not_copied() -> None:
    given = spec()
    assert given.with_train(given.train) is given
    assert given.train is not None
    other = given.train.model_copy(update={"epochs": 7})
    assert given.with_train(other).train is other
