"""Rows that pass through the model without weights before a purchase; every printed fix is followed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.trainer.standalone.test_preflight import PLAIN, spec, told
from tests.trainer.support import tiny_models
from trainer import preflight
from trainer.contract.architectures import QUANTISED_EXPERTS, is_mixture
from trainer.core.errors import UserFault
from trainer.models import loading, remote_code
from trainer.tasks.common.row_sample import RANDOM_ROWS, RowSample

ROWS = "word,meaning\nw1,w2\nw3,w4 w5 w6\nw7,w8\n"
CLASSES: dict[str, Any] = {"prompt": "{word}", "label": "meaning", "eval_share": 0}


def with_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_row_that_the_layers_cannot_take_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_config(tiny_models.llama(tmp_path / "model"), num_attention_heads=4, num_key_value_heads=3)
    path = spec(tmp_path, ROWS, model=str(folder), data=PLAIN | {"eval_share": 0})
    code, _, err = told(path, capsys)
    assert code == 64
    assert f"train.model: {str(folder)!r} cannot take row 1 of rows.csv (" in err
    assert err.endswith("mend its config.json, or take another model\n")
    with_config(folder, num_attention_heads=2, num_key_value_heads=2)
    assert told(path, capsys)[0] == 0


def test_experts_are_computed_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.causal("mixtral", tmp_path / "model")
    code, found, _ = told(spec(tmp_path, ROWS, model=str(folder), data=PLAIN | {"eval_share": 0.3}), capsys)
    assert (code, found["warnings"]) == (0, [])


def test_qlora_of_a_mixture_is_refused_before_a_purchase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words are those of the daemon's check and of the trainer."""
    train = {"model": str(tiny_models.causal("mixtral", tmp_path / "model")), "data": PLAIN | {"eval_share": 0.3}}
    path = spec(tmp_path, ROWS, **train, method={"kind": "qlora"})
    code, _, err = told(path, capsys)
    assert code == 64
    assert err.endswith(f"{path}: train.method.kind: {QUANTISED_EXPERTS}\n")  # behind a bar of the model's saving
    assert told(spec(tmp_path, ROWS, **train, method={"kind": "lora"}), capsys)[0] == 0


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "olmoe", "ernie4_5_moe"]
)
def test_the_experts_of_every_family_are_found(family: str) -> None:
    """The daemon finds them by the config, the trainer by the modules."""
    dense_layers = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=2, **dense_layers)
    assert is_mixture(config.to_dict())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserFault, match=QUANTISED_EXPERTS):
        loading.check_quantisable(model)


def test_a_token_without_an_embedding_is_named_by_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.llama(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(folder)
    path = spec(tmp_path, "word,meaning\nw1,w2\nw3,new\n", model=str(folder), data=PLAIN | {"eval_share": 0})
    code, _, err = told(path, capsys)
    assert code == 64
    assert "train.model: row 2 of rows.csv has token 200 ('new'), and" in err
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    assert told(path, capsys)[0] == 0


@pytest.mark.parametrize("task", ["text_classification", "token_classification", "reward_model"])
def test_a_sample_longer_than_the_positions_is_refused(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {
        "text_classification": CLASSES,
        "token_classification": {"words": "word", "label": "meaning", "eval_share": 0},
        "reward_model": {"chosen": "{word}", "rejected": "{meaning}", "eval_share": 0},
    }[task]
    prompt = "w1 " * 65
    more = {"task": task, "model": str(tiny_models.bert(tmp_path / "model")), "data": data, "max_length": 80}
    path = spec(tmp_path, "word,meaning\nw1,w2\nw3,w4\n", **more, samples={"prompts": [prompt]})
    code, _, err = told(path, capsys)
    assert code == 64, err
    assert f"has {65 + (task == 'reward_model')} tokens," in err  # a reward is read at the end token
    assert "has 64 positions; shorten it" in err
    assert told(spec(tmp_path, "word,meaning\nw1,w2\nw3,w4\n", **more, samples={"prompts": ["w1"]}), capsys)[0] == 0


def test_positions_after_the_padding_are_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RoBERTa's table of 16 has a place for 15 tokens if padding is 0: the model fails at one more."""
    folder = tmp_path / "model"
    config = transformers.RobertaConfig(**tiny_models.BERT | {"max_position_embeddings": 16})
    model = transformers.RobertaForSequenceClassification(config)
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    rows = f"word,meaning\nw1,a\n{'w2 ' * 20},b\n"
    train = {"task": "text_classification", "model": str(folder), "data": CLASSES}
    code, _, err = told(spec(tmp_path, rows, **train, max_length=16), capsys)
    assert code == 64
    assert "rows reach 16 tokens (row 2)" in err
    assert err.endswith("has 15 positions; lower it to 15\n")
    assert told(spec(tmp_path, rows, **train, max_length=15), capsys)[0] == 0
    model(torch.ones((1, 15), dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.ones((1, 16), dtype=torch.long))


def pictures(folder: Path) -> None:
    for number, kind in enumerate("aabb"):
        place = folder / "shots" / kind / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (number, 9, 9)).save(place)


def picture_spec(folder: Path, model: Path) -> Path:
    data = {"path": "shots", "image": "image", "label": "label", "eval_share": 0}
    train = {"task": "image_classification", "model": str(model), "data": data, "global_batch": 2}
    (folder / "job.yaml").write_text(json.dumps({"name": "a", "cap_usd": 1, "train": train}))
    return folder / "job.yaml"


def test_a_model_of_pictures_of_any_size_takes_any_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ConvNeXt's config names the size of its first training, and the published processors make others."""
    pictures(tmp_path)
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "image_size": 32}
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "model")
    capsys.readouterr()  # a bar of the model's saving
    code, _, err = told(picture_spec(tmp_path, tmp_path / "model"), capsys)
    assert (code, err) == (0, "")
    model(torch.zeros((1, 3, 64, 64)))


NORMED: dict[str, dict[str, Any]] = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "MobileNetV1": {"depth_multiplier": 0.25},
    "MobileNetV2": {"depth_multiplier": 0.35},
}


@pytest.mark.parametrize("family", NORMED)
def test_a_model_with_batch_norms_takes_a_single_row(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch norm that trains needs two values a channel, and these models reduce 32 x 32 pixels to one."""
    pictures(tmp_path)
    config = getattr(transformers, f"{family}Config")(**NORMED[family])
    model = getattr(transformers, f"{family}ForImageClassification")(config)
    model.save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    capsys.readouterr()  # a bar of the model's saving
    code, found, err = told(picture_spec(tmp_path, tmp_path / "model"), capsys)
    assert (code, err) == (0, "")
    assert not any("no row was tried" in warning for warning in found["warnings"])
    model.train()(torch.zeros((2, 3, 32, 32)))


def test_a_picture_of_another_size_is_refused_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures(tmp_path)
    folder = tiny_models.vit(tmp_path / "model")
    capsys.readouterr()  # a bar of the model's saving
    processor = folder / "preprocessor_config.json"
    right = processor.read_text()
    processor.write_text(json.dumps(json.loads(right) | {"size": {"height": 16, "width": 16}}))
    code, _, err = told(picture_spec(tmp_path, folder), capsys)
    assert code == 64
    assert err.endswith("makes pictures of 16 x 16, the model takes 8 x 8; set its size\n")
    processor.write_text(right)
    assert told(picture_spec(tmp_path, folder), capsys)[0] == 0


def test_an_encoder_decoder_without_a_start_token_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer would refuse it after the purchase."""
    folder = shutil.copytree(tiny_models.bart(tmp_path / "bart"), tmp_path / "model")
    with_config(folder, decoder_start_token_id=None)
    data = {"prompt": "{word}", "completion": "{meaning}", "eval_share": 0}
    path = spec(tmp_path, ROWS, task="seq2seq", model=str(folder), data=data)
    code, _, err = told(path, capsys)
    assert (code, "has no decoder_start_token_id; add the one it was trained with" in err) == (64, True)
    with_config(folder, decoder_start_token_id=2)
    assert told(path, capsys)[0] == 0


OWN_CONFIG = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
OWN_MODEL = """
{imports}
from transformers import LlamaForCausalLM
from .own_config import OwnConfig
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_own_code_with_an_absent_package_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The package may exist on the machine that trains."""
    folder = tiny_models.llama(tmp_path / "model")
    own = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.Own"}
    with_config(folder, model_type="own", auto_map=own)
    (folder / "own_config.py").write_text(OWN_CONFIG)
    (folder / "own_model.py").write_text(OWN_MODEL.format(imports="import no_such_kernels"))
    path = spec(tmp_path, ROWS, model=str(folder), data=PLAIN | {"eval_share": 0.3}, trust_remote_code=True)
    capsys.readouterr()  # a bar of the model's saving
    code = preflight.main([str(path), "--json", remote_code.FLAG])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    (warning,) = document["warnings"]
    assert warning.startswith("no row was tried in the model, because its code does not load here (")
    assert "no_such_kernels" in warning
    (folder / "own_model.py").write_text(OWN_MODEL.format(imports=""))
    assert preflight.main([str(path), "--json", remote_code.FLAG]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_a_sample_has_the_first_the_longest_and_random_rows() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    drawn = []
    for seed in range(20):
        sample = RowSample(seed)
        for number, length in enumerate(lengths, 1):
            sample.offer(number, f"row {number}", length)
        rows = sample.rows()
        assert rows.keys() >= {1, 6}
        assert len(rows) <= 2 + RANDOM_ROWS
        assert all(parsed == f"row {number}" for number, parsed in rows.items())
        drawn += rows
    assert set(drawn) == set(range(1, len(lengths) + 1))
