"""Messages of refused documents: place and fix in plain words."""

from typing import Any

import pytest
from pydantic import ValidationError

from broker.domain.spec import JobSpec
from trainer.contract.validation_messages import error_messages

TRAIN: dict[str, Any] = {"model": "a/b", "data": {"path": "rows.csv", "completion": "{text}"}}


def messages(**changes: Any) -> dict[str, str]:
    document = {"name": "job", "cap_usd": "1", "train": TRAIN, **changes}
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate(document)
    return error_messages(refused.value, JobSpec, document)


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        ({"train": TRAIN | {"env": {}}}, "train.env", "unknown key here; did you mean env at the top level?"),
        (
            {"resources": {"cap_usd": 1}},
            "resources.cap_usd",
            "unknown key here; did you mean cap_usd at the top level?",
        ),
        ({"spot": "only"}, "spot", "unknown key here; did you mean resources.spot?"),
        ({"gpus": 2}, "gpus", "unknown key here; did you mean resources.gpus?"),
        ({"lables": {}}, "lables", "unknown key; did you mean labels?"),
        ({"train": TRAIN | {"method": "lora"}}, "train.method", 'must be a mapping such as {kind: …}, not "lora"'),
        ({"train": TRAIN | {"epochs": "two"}}, "train.epochs", 'must be a valid number, not "two"'),
        ({"resources": {"gpus": "two"}}, "resources.gpus", "must be a valid integer, not \"two\", or must be 'auto'"),
    ],
)
def test_refused_values_name_the_place_and_the_fix(changes: dict[str, Any], place: str, message: str) -> None:
    assert {at: text[: len(message)] for at, text in messages(**changes).items()} == {place: message}
