"""Steps that attempts ran twice, from their reports."""

from dataclasses import dataclass

from broker.reporting.progress import steps, steps_redone
from trainer.contract.documents import Final, Heartbeat, Outcome


@dataclass(frozen=True)
class Ran:
    beat: Heartbeat | None = None
    final: Final | None = None


def ran(end: int, start: int | None = None) -> Ran:
    return Ran(beat=Heartbeat(attempt="a", boot="b", seq=1, step=end, resumed_from=start))


def test_steps_come_from_the_final_report_too() -> None:
    final = Final(attempt="a", outcome=Outcome.COMPLETED, step=45)
    assert steps(Ran()) == (None, None)
    assert steps(Ran(beat=ran(18, 10).beat, final=final)) == (10, 45)


def test_redone_steps_are_those_before_the_resume_point() -> None:
    assert steps_redone([ran(20), Ran(), ran(30, 15), ran(45, 30)]) == 5
    assert steps_redone([ran(20), ran(18, 15)]) == 3
    assert steps_redone([]) == 0
