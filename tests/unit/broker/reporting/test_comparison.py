"""Results of runs side by side, and the settings in which their specs differ."""

import pytest

from broker.domain.spec import JobSpec
from broker.reporting.comparison import ReportedResult, SpecDifference, run_result, setting_text, spec_differences
from tests.unit.broker.reporting.test_progress import Ran
from trainer.contract.documents import Final, Heartbeat, Outcome


def beat(step: int, **more: float | None) -> Heartbeat:
    return Heartbeat.model_validate({"attempt": "a", "boot": "b", "seq": 1, "step": step, "total_steps": 45} | more)


def test_a_result_is_of_the_latest_reports_of_all_attempts() -> None:
    final = Final(
        attempt="a", outcome=Outcome.COMPLETED, step=45, total_steps=45, heldout_loss_before=4.0,
        heldout_loss_after=3.0, tokens_per_s=90.0,
    )  # fmt: skip
    attempts = [Ran(beat=beat(20, loss=3.5, tokens_per_s=70.0)), Ran(), Ran(beat=beat(44, loss=3.1), final=final)]
    assert run_result(attempts) == ReportedResult(
        step=45, total_steps=45, loss=3.1, heldout_before=4.0, heldout_after=3.0, tokens_per_s=90.0
    )
    assert run_result(attempts[:1]).heldout_after is None
    assert run_result([Ran(beat=beat(20, heldout_loss=3.3))]).heldout_after == 3.3
    assert run_result([]) == ReportedResult(
        step=0, total_steps=0, loss=None, heldout_before=None, heldout_after=None, tokens_per_s=None
    )


def spec(name: str, cap: str = "5", **train: object) -> JobSpec:
    data = {"path": "a.csv", "completion": "{x}"}
    return JobSpec.model_validate({"name": name, "cap_usd": cap, "train": {"model": "m/m", "data": data} | train})


def test_only_settings_that_differ_are_listed_and_no_names() -> None:
    one = spec("a", seed=1, method={"kind": "full"}, max_length=256)
    two = spec("b", "5.00", seed=2, method={"kind": "lora", "targets": ["q_proj"]}, max_length=256)
    found = {difference.path: difference.values for difference in spec_differences([one, two])}
    assert found["train.seed"] == (1, 2)
    assert found["train.method.kind"] == ("full", "lora")
    assert found["train.method.targets"] == (None, ["q_proj"])
    assert not {"name", "cap_usd", "train.max_length"} & set(found)
    assert spec_differences([one, one]) == spec_differences([one]) == spec_differences([]) == []
    assert spec_differences([spec("a"), spec("a", "7.50")]) == [SpecDifference(path="cap_usd", values=("5", "7.5"))]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (True, "yes"), (False, "no"), ("é", "é"), (["é", 1], '["é", 1]'), (0.5, "0.5")]
)
def test_a_setting_is_one_line(value: object, text: str) -> None:
    assert setting_text(value) == text
