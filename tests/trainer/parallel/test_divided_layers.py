"""Models and options that tensor and context parallelism refuse before any layer is divided."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainer.support.tiny_models import bert, llama
from trainer.contract.documents import Parallelism
from trainer.core.errors import UserFault

TWO: Any = SimpleNamespace(size=lambda: 2)
THREE: Any = SimpleNamespace(size=lambda: 3)


@pytest.mark.parametrize(
    ("make", "mesh", "why"),
    [
        (bert, TWO, "transformers has no plan for a bert model; set it to 1"),
        (llama, THREE, "3 does not divide num_attention_heads of this llama model, 2"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    make: Callable[[Path], Path], mesh: Any, why: str, tmp_path: Path
) -> None:
    from transformers import AutoModel

    from trainer.parallel import tensor_parallel

    with pytest.raises(UserFault, match=f"world.parallelism.tensor: {why}"):
        tensor_parallel.divide(AutoModel.from_pretrained(make(tmp_path / "model")), mesh)


def test_norms_within_heads_are_divided_only_while_they_are_not_trained() -> None:
    """transformers sums their gradients over all processes after every micro-batch, and adds earlier sums again."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer.parallel import tensor_parallel

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=16))
    plan = model.tp_plan
    with pytest.raises(UserFault, match="replicated_with_grad_allreduce"):
        tensor_parallel._refuse(model, plan, 2)
    model.requires_grad_(False)
    tensor_parallel._refuse(model, plan, 2)


def test_attention_that_cannot_gather_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trainer.parallel.context_parallel import ContextParallel

    model = AutoModelForCausalLM.from_pretrained(llama(tmp_path / "model"), attn_implementation="eager")
    mesh: Any = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
    with pytest.raises(UserFault, match=r"world\.parallelism\.context: only with train.attention auto or sdpa"):
        ContextParallel(mesh).attach(model)


def test_a_sequence_shard_attends_to_earlier_tokens_of_its_row() -> None:
    """A pack has rows of 4 and 3 tokens, and one token of padding so that two processes get equal shards."""
    import torch

    from trainer.parallel.context_parallel import ContextParallel

    mesh: Any = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)
    context = ContextParallel(mesh)
    ids, positions = torch.arange(1, 8)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    made = context.shard_sequence({"input_ids": ids, "position_ids": positions, "wanted": ids + 1})
    assert made["input_ids"].tolist() == [[5, 6, 7, 0]]
    assert made["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert made["wanted"].tolist() == [[6, 7, 8, -100]]
    seen = [[int(n) for n in row.nonzero()] for row in context._seen[0]]
    assert seen == [[4], [4, 5], [4, 5, 6], [7]]


def test_tensor_and_sequence_parallelism_require_fsdp() -> None:
    with pytest.raises(ValidationError, match="set kind to fsdp"):
        Parallelism(tensor=2)
