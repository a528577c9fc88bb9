"""Losses that a model's config asks for: equal to the loss that transformers computes itself, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_models
from trainer import tasks
from trainer.batching.examples import Example
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.tasks.text.seq2seq import Pair

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**LOCAL, **ASKED},
    "qwen2_moe": {**EXPERTS, **ASKED, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_moe": {**EXPERTS, **ASKED, "head_dim": 16},
    "olmoe": {**EXPERTS, **ASKED},
    "gpt_oss": {**LOCAL, **ASKED, "head_dim": 16},
    "phimoe": {**LOCAL, **ASKED},
    "granitemoe": {**LOCAL, **ASKED},
    "jetmoe": {**LOCAL, "output_router_logits": True, "aux_loss_coef": 0.5, "kv_channels": 16},
    "minimax_m2": {**LOCAL, **ASKED, "head_dim": 16},
    "bamba": {"z_loss_coefficient": 0.5, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
              "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2},
}  # fmt: skip
ROWS = [
    Example(ids=[5, 9, 17, 40, 3, 2], prompt=2),
    Example(ids=[7, 30, 31, 32, 33, 34, 35, 2], prompt=3, silent=((4, 6),)),
    Example(ids=[8, 2], prompt=1),
]


def published(kind: str, folder: Path, **changes: Any) -> Any:
    """Return a tiny model of the kind in evaluation mode, and save it with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **{**SIZES, **MIXTURES[kind], **changes})
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    config.save_pretrained(folder)
    return model


def settings(folder: Path, **changes: Any) -> TrainConfig:
    data = {"path": "rows.jsonl", "prompt": "{q}", "completion": "{a}"}
    return TrainConfig.model_validate({"model": str(folder), "data": data, "max_length": 32} | changes)


def loss_and_gradient(model: Any, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_loss_and_its_gradient_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = published(kind, tmp_path)
    task = tasks.build_task(settings(tmp_path))
    batch = task.data.collate(ROWS, CPU)
    targets = sum(map(task.data.targets, ROWS))
    loss, gradient = loss_and_gradient(model, task.model.loss_sum(model, batch) / targets)

    rows = [[*row.labels, *[-100] * (8 - len(row.labels))] for row in ROWS]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    theirs, their_gradient = loss_and_gradient(model, model(**inputs, labels=torch.tensor(rows)).loss)
    assert loss == pytest.approx(theirs, rel=1e-6)
    assert torch.allclose(gradient, their_gradient, rtol=1e-4, atol=1e-6)

    plain = published(kind, tmp_path, output_router_logits=False, z_loss_coefficient=0.0)
    alone = float(task.model.loss_sum(plain, batch)) / targets
    assert loss > alone + 0.1, "the config's loss counts"


def test_an_adapter_and_recomputed_layers_keep_the_loss(tmp_path: Path) -> None:
    import peft

    model = published("mixtral", tmp_path)
    task = tasks.build_task(settings(tmp_path))
    batch = task.data.collate(ROWS, CPU)
    expected = float(task.model.loss_sum(model, batch))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert float(task.model.loss_sum(adapted, batch)) == pytest.approx(expected, rel=1e-6)
    plain = published("mixtral", tmp_path).train()
    _, gradient = loss_and_gradient(plain, task.model.loss_sum(plain, batch))
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed, again = loss_and_gradient(plain, task.model.loss_sum(plain, batch))
    assert recomputed == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(gradient, again, rtol=1e-4, atol=1e-6)


SPARSE: dict[str, dict[str, Any]] = {
    "switch_transformers": {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 4, "num_decoder_layers": 4,
                            "num_heads": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    "nllb-moe": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_sparse_step": 2,
                 "decoder_sparse_step": 2, "max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", SPARSE)
def test_an_encoder_decoder_adds_the_losses_of_its_router(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(5)
    common = {"vocab_size": 64, "num_experts": 4, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.5}
    asked = {**common, "output_router_logits": True, "decoder_start_token_id": 0, "pad_token_id": 0}
    model: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **asked, **SPARSE[kind])).float().eval()
    task = tasks.build_task(settings(tmp_path, task="seq2seq"))
    task.model._configure(model)
    pairs = [Pair(ids=[5, 6, 7, 1], labels=[9, 10, 1], number=1), Pair(ids=[8, 1], labels=[11, 1], number=2)]
    batch = task.data.collate(pairs, CPU)
    loss = float(task.model.loss_sum(model, batch).detach()) / 5
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids", "labels")}
    assert loss == pytest.approx(float(model(**inputs, output_router_logits=True).loss), rel=1e-6)
    assert loss > float(model(**inputs, output_router_logits=False).loss) + 0.1, "the config's losses count"


def test_preferences_refuse_a_loss_of_the_config_that_they_do_not_add(tmp_path: Path) -> None:
    published("mixtral", tmp_path)
    tiny_models.tokenizer().save_pretrained(tmp_path)
    data = {"path": "rows.jsonl", "prompt": "{q}", "chosen": "{a}", "rejected": "{b}"}
    task = tasks.build_task(settings(tmp_path, task="dpo", data=data, method={"kind": "lora"}))
    with pytest.raises(
        UserFault, match="sets output_router_logits, and task dpo adds no such loss; remove it in a copy"
    ):
        task.model.check_kind()


def test_no_model_of_a_task_smooths_its_labels() -> None:
    """A config's `label_smoothing` changes the loss of models only that no task takes, such as RAG."""
    from transformers.models import auto
    from transformers.models.auto.configuration_auto import model_type_to_module_name as module_of

    named = auto.modeling_auto
    mappings = (named.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, named.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    folders = {module_of(kind) for mapping in mappings for kind in mapping}
    sources = [path for path in Path(auto.__file__).parents[1].glob("*/modeling_*.py") if path.parent.name in folders]
    assert len(sources) > 100
    assert [path.name for path in sources if "label_smoothing" in path.read_text()] == []


@pytest.mark.parametrize("name", ["label_smoothing", "label_smoothing_factor"])
def test_label_smoothing_of_a_spec_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        settings(tmp_path, **{name: 0.1})
