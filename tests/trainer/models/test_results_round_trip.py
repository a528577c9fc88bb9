"""Saved results are what was trained: merged weights, and the tokenizer as it was published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support.tokenizers import byte_level, sentence_pieces
from trainer import tasks
from trainer.contract.data_config import DataConfig
from trainer.contract.output import OutputConfig
from trainer.contract.train import LoraConfig, TrainConfig
from trainer.core.errors import UserFault
from trainer.models import adapters, loading


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a decoder whose output weights are its input embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("models") / "tied", byte_level()
    torch.manual_seed(3)
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def trained(tied: Path, tmp_path: Path) -> tuple[Any, list[Any]]:
    """Write an adapter of the attention and the tied head; return the task and some rows."""
    rows = "\n".join(json.dumps({"q": f"What of {n}?", "a": f" The price {n}."}) for n in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = TrainConfig(
        model=str(tied), data=DataConfig(path="rows.jsonl", prompt="{q}", completion="{a}"), precision="fp32",
        method=LoraConfig(r=8, alpha=32, dropout=0, targets=("q_proj", "lm_head")), max_steps=1, global_batch=2,
    )  # fmt: skip
    task = tasks.build_task(config)
    examples, _ = task.examples(tmp_path / "rows.jsonl", "jsonl")
    model = task.model.build("fp32")
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.4)
    task.model.save(tmp_path, model)
    return task, list(examples)


def test_merged_model_with_tied_head_equals_base_and_adapter(
    trained: tuple[Any, list[Any]], tied: Path, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    task, rows = trained
    compared = task.model.merge(tmp_path, rows)
    assert compared["merged_loss"] == pytest.approx(compared["adapter_loss"], rel=1e-5)
    ids = torch.tensor([rows[0].ids])
    base, merged = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (tied, tmp_path / "model"))
    embeddings = base.get_input_embeddings().weight.clone()
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(ids).logits
        assert torch.allclose(merged(ids).logits, adapted, atol=1e-4)
    assert torch.equal(merged.get_input_embeddings().weight, embeddings), "the adapter never changed the embeddings"


def test_merge_that_changes_the_model_is_refused(
    trained: tuple[Any, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "untie_adapted_head", lambda model: None)
    task, rows = trained
    with pytest.raises(UserFault, match=r"output\.merge: the merged model has the loss .* choose other train\.method"):
        task.model.merge(tmp_path, rows)
    assert not (tmp_path / "model").exists()


def test_merge_with_a_loss_that_is_no_number_is_refused(
    trained: tuple[Any, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, rows = trained
    monkeypatch.setattr(task.model, "loss_sum", lambda model, batch: torch.tensor(float("nan")))
    with pytest.raises(UserFault, match=r"output\.merge: the merged model has the loss nan"):
        task.model.merge(tmp_path, rows)
    assert not (tmp_path / "model").exists()


def test_adapter_on_the_shared_head_of_an_encoder_decoder_is_not_merged(tmp_path: Path) -> None:
    """BART's encoder and decoder embeddings are the head's weights: untied, they would be saved nowhere."""
    from transformers import BartConfig, BartForConditionalGeneration

    tokenizer = byte_level()
    settings = BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    BartForConditionalGeneration(settings).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = TrainConfig(
        model=str(tmp_path / "base"), task="seq2seq", precision="fp32", max_steps=1, global_batch=2, max_length=32,
        data=DataConfig(path="rows.jsonl", prompt="{q}", completion="{a}"),
        method=LoraConfig(r=2, targets=("lm_head",)), output=OutputConfig(merge=True),
    )  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"q": f"a {n}", "a": f"b {n}"}) for n in range(4)))
    task = tasks.build_task(config)
    task.examples(tmp_path / "rows.jsonl", "jsonl")
    task.model.save(tmp_path, task.model.build("fp32"))
    with pytest.raises(UserFault, match=r"output\.merge: .* set output\.merge: false"):  # in the preflight
        task.model.check_targets(task.model.build_hollow())
    with pytest.raises(UserFault, match=r"output\.merge: .* set output\.merge: false, or choose other train\.method"):
        task.model.merge(tmp_path)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("published", [{}, {"truncation": 7}, {"padding": "[PAD]"}])
def test_tokenizer_is_saved_with_the_state_it_was_published_with(published: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_level()
    if "truncation" in published:
        tokenizer.backend_tokenizer.enable_truncation(7)
    if "padding" in published:
        tokenizer.backend_tokenizer.enable_padding(pad_id=3, pad_token="<pad>")
    state = loading.encoding_state(tokenizer)
    tokenizer(["What of bread?", "bread"], truncation=True, max_length=3, padding=True)
    loading.save_tokenizer(tmp_path, tokenizer, state)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (saved["truncation"] is None, saved["padding"] is None) == (
        "truncation" not in published,
        "padding" not in published,
    )
    assert AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.truncation == (state or (None, None))[0]


def test_classifier_is_saved_with_a_padding_token(tmp_path: Path) -> None:
    """A decoder's tokenizer may have none; a batch of two texts of different length needs one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = sentence_pieces(legacy=False)
    tokenizer.pad_token = None
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(settings).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = "\n".join(json.dumps({"q": f"What of {n}?", "mood": "good" if n % 2 else "bad"}) for n in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = TrainConfig(
        model=str(tmp_path / "base"), task="text_classification", max_steps=1, global_batch=2,
        data=DataConfig(path="rows.jsonl", prompt="{q}", label="mood"), method=LoraConfig(r=2),
    )  # fmt: skip
    task = tasks.build_task(config)
    task.examples(tmp_path / "rows.jsonl", "jsonl")
    model = task.model.build("fp32")
    task.model.save(tmp_path, model)
    saved = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert saved.pad_token_id == model.config.pad_token_id
    assert saved(["a", "a b c d"], padding=True)["input_ids"][0][-1] == saved.pad_token_id
