"""A sample of the kill schedules, others for every commit; `python -m benchmarks.resume_matrix` carries out many."""

import pytest

from tests.crash.scenes import commit
from tests.trainer.schedules import Matrix
from tests.trainer.tiny_jobs import KINDS

SCHEDULES = 10
FIRST = int(commit(), 16) % len(KINDS)
"""There are more kinds of jobs than schedules here."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("number", range(SCHEDULES))
def test_a_run_that_is_killed_by_schedule_equals_the_undisturbed_one(matrix: Matrix, number: int) -> None:
    kills = matrix.found.kills.total()
    matrix.carry_out(number + FIRST, int(commit(), 16))
    assert matrix.found.broken == []
    assert matrix.found.kills.total() > kills
