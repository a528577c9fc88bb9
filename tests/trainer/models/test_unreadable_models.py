"""Models that cannot be trained: refused in one line by the preflight and the trainer, before anything is bought."""

import json
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import InvalidInput
from broker.preflight.model_lookup import resolve_for
from tests.trainer.standalone.test_preflight import CLASSES, PAIRS, TEXTS, spec
from tests.trainer.support import tiny_models as heads
from trainer import preflight, tasks
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    heads.tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def refused(folder: Path, model: Path, data: dict[str, Any], capsys: pytest.CaptureFixture[str], **more: Any) -> str:
    """Return the common message of preflight and the trainer, without the path in front."""
    train: dict[str, Any] = {"model": str(model), "data": data, **more}
    path = spec(folder, "word,meaning\nw1,w2\nw3,w4\n", **train)
    assert preflight.main([str(path)]) == 64
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    with pytest.raises(UserFault) as caught:
        tasks.build_task(TrainConfig.model_validate({"max_length": 16, **train})).examples(folder / "rows.csv", "csv")
    assert said == f"{path}: {caught.value}\n"
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": "x"}, "hidden_size"),
        ({"rope_parameters": 7}, "int"),
        ({"layer_types": ["nothing"], "num_hidden_layers": 1}, "layer_types"),
        ({"model_type": ["llama"]}, ""),
        ({"id2label": 5}, ""),
    ],
)
def test_a_config_of_wrong_types_is_named(
    changes: dict[str, Any], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama"} | changes))
    said = refused(tmp_path, model, TEXTS, capsys)
    assert said.startswith(f"train.model: cannot load {str(model)!r} (")
    assert told in said.split("(", 1)[1].split(");")[0]
    assert "Validation error for" not in said, "the reason is the cause's line"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize(
    ("task", "kind", "data"),
    [
        ("causal_lm", "llama", TEXTS),
        ("causal_lm", "opt", TEXTS),
        ("dpo", "llama", PAIRS),
        ("text_classification", "bert", CLASSES),
        ("seq2seq", "t5", TEXTS),
    ],
)
async def test_a_quantised_base_is_refused_as_at_submit(
    task: str, kind: str, data: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"is_encoder_decoder": True} if kind == "t5" else {}
    (model / "config.json").write_text(json.dumps({"model_type": kind, "quantization_config": GPTQ, **pair}))
    said = refused(tmp_path, model, data, capsys, task=task)
    assert said == f"train.model: {str(model)!r} is quantised; give the model that it was made from"
    fields: dict[str, Any] = {"model": str(model), "task": task, "data": data}
    for trusted in (False, True):
        train = TrainConfig.model_validate(fields | {"trust_remote_code": trusted})
        with pytest.raises(InvalidInput) as submitted:
            await resolve_for(train, hub=None)
        assert [p.message for p in submitted.value.problems] == [said.replace(str(model), model.name)[13:]]
