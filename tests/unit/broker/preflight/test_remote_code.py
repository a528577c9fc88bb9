"""Models whose own code an installation lets jobs run."""

from pathlib import Path

import pytest

from broker.domain.errors import InvalidInput
from broker.preflight import remote_code as code
from trainer.contract.train import TrainConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def train(model: object, **more: object) -> TrainConfig:
    data = {"path": "upload:x", "completion": "{a}"}
    return TrainConfig.model_validate({"model": str(model), "data": data, "trust_remote_code": True, **more})


def test_nothing_is_allowed_unless_it_is_listed() -> None:
    code.check(None, ())
    code.check(train("owner/name", trust_remote_code=False), ())
    with pytest.raises(
        InvalidInput, match=r"train.trust_remote_code: .*can allow it in trainer.remote_code of gpubroker"
    ):
        code.check(train("owner/name", revision=COMMIT), ("other/*", "owner/names"))
    code.check(train("owner/name", revision=COMMIT), ("other/*", "owner/*"))


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12]])
def test_code_of_the_hub_needs_a_commit(revision: str | None) -> None:
    with pytest.raises(InvalidInput, match=r"train.revision: 'owner/name' contains code, which may change"):
        code.check(train("owner/name", revision=revision), ("*",))


def test_a_listed_folder_cannot_be_left(tmp_path: Path) -> None:
    for name in ("allowed/one", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "allowed/link").symlink_to(tmp_path / "other")
    allowed = (f"{tmp_path}/allowed/*",)
    one = train(tmp_path / "allowed/one")
    assert code.check(one, allowed) == one
    (tmp_path / "short").symlink_to(tmp_path / "allowed/one")
    assert code.check(train(tmp_path / "short"), allowed) == one, "the link may lead elsewhere later"
    assert code.check(train(tmp_path / "short", trust_remote_code=False), ()) != one
    for path in ("allowed/../other", "allowed/link"):
        with pytest.raises(InvalidInput, match=f"{path}' is not allowed"):  # the target of a link is not revealed
            code.check(train(f"{tmp_path}/{path}"), allowed)
