"""Sample of the kill schedules, chosen by the commit; `benchmarks.resume_matrix` runs many."""

import pytest

from tests.crash.scenes import commit
from tests.trainer.support.kill_schedules import Matrix
from tests.trainer.support.tiny_jobs import KINDS

SCHEDULES = 10


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("number", range(SCHEDULES))
def test_a_run_that_is_killed_by_schedule_equals_the_undisturbed_one(matrix: Matrix, number: int) -> None:
    kills = matrix.found.kills.total()
    seed = int(commit(), 16)
    matrix.carry_out(seed % len(KINDS) + number, seed)
    assert matrix.found.broken == []
    assert matrix.found.kills.total() > kills
