"""Targets of a LoRA choose modules as peft does; tests/trainer/memtrace compares with peft itself."""

from dataclasses import replace

import pytest

from broker.domain.workload import ModelShape, Workload
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate, adapted_modules, estimate
from broker.estimator.memory.job_memory import adapted
from broker.model_catalog import catalog as catalogue
from broker.model_catalog.decoder_shape import headed_shape, shape_of, written_shape


def of(name: str) -> ModelShape:
    found = catalogue.find(name)
    assert found is not None
    config = found.config
    return headed_shape(name, config) or written_shape(name, config) or shape_of(name, config, mixtures=True)


LLAMA, GPT2, NEOX = of("meta-llama/Llama-3.1-8B"), of("openai-community/gpt2"), of("EleutherAI/pythia-160m")
BERT, T5, BART = of("google-bert/bert-base-uncased"), of("google-t5/t5-small"), of("facebook/bart-base")
MIXTRAL = of("mistralai/Mixtral-8x7B-v0.1")
EVERY = frozenset({"q", "k", "v", "o", "gate", "up", "down"})


@pytest.mark.parametrize(
    ("shape", "targets", "roles"),
    [
        (LLAMA, ("all-linear",), EVERY),
        (LLAMA, "all-linear", EVERY),
        (LLAMA, ("q_proj", "v_proj"), {"q", "v"}),
        (LLAMA, ("self_attn.q_proj",), {"q"}),
        (LLAMA, r".*\.(q|v)_proj", {"q", "v"}),
        (LLAMA, r"model\.layers\.\d{1,2}\.mlp\.\w+_proj", {"gate", "up", "down"}),
        (LLAMA, ("lm_head", "embed_tokens"), {"head", "embeddings"}),
        (LLAMA, r"(.*\.)?(embed_tokens|lm_head|o_proj)", {"head", "embeddings", "o"}),
        (replace(LLAMA, head="text", labels=2), r".*o_proj|lm_head", {"o"}),
        (replace(LLAMA, family="unheard_of"), ("down_proj",), {"down"}),
        (GPT2, ("c_proj",), {"o", "proj"}),
        (GPT2, ("mlp.c_proj", "wte"), {"proj", "embeddings"}),
        (NEOX, ("embed_out",), {"head"}),
        (BERT, ("dense",), {"o", "fc", "proj", "pooler"}),
        (BERT, ("attention.output.dense",), {"o"}),
        (BERT, ("all-linear",), {"q", "k", "v", "o", "fc", "proj", "pooler"}),
        (T5, ("q",), {"q", "cross q"}),
        (T5, ("EncDecAttention.q", "wo"), {"cross q", "proj"}),
        (BART, ("fc1", "encoder_attn.out_proj"), {"fc", "cross o"}),
    ],
)
def test_names_and_patterns_choose_modules(
    shape: ModelShape, targets: tuple[str, ...] | str, roles: frozenset[str]
) -> None:
    assert adapted_modules(shape, targets) == (roles, ())


def test_experts_are_linear_modules_until_transformers_5() -> None:
    assert adapted_modules(MIXTRAL, ("w1", "q_proj"), "4.48.1") == (frozenset({"gate", "q"}), ())
    assert adapted_modules(MIXTRAL, ("w1", "q_proj"))[0] == {"q"}


@pytest.mark.parametrize(
    ("shape", "targets", "said"),
    [
        (LLAMA, ("q_prj",), "q_prj matches no module of llama, the nearest is q_proj; it has q_proj, k_proj"),
        (LLAMA, ("proj",), "proj matches no module of llama"),
        (LLAMA, r"q_proj|v_proj", "matches no module"),
        (LLAMA, (), "(none) matches no module"),
        (LLAMA, ("mlp", "q_proj"), "mlp,q_proj: matches model.layers.0.mlp, which is not a linear module"),
        (LLAMA, r".*layers\.7\.mlp.*", "matches model.layers.7.mlp, which is not a linear module: peft refuses it"),
        (GPT2, ("wpe",), "matches transformer.wpe, whose adapter is not estimated"),
        (T5, ("lm_head",), "matches lm_head, whose adapter is not estimated"),
        (BERT, ("word_embeddings",), "whose adapter is not estimated"),
        (LLAMA, r"(?<=a)q_proj", "is not a valid regular expression; look-around"),
        (LLAMA, r"(q", "is not a valid regular expression"),
        (LLAMA, "q" * 1001, "is longer than 1000 characters"),
    ],
)
def test_targets_that_match_no_module_are_refused_in_one_line(
    shape: ModelShape, targets: tuple[str, ...] | str, said: str
) -> None:
    with pytest.raises(InvalidEstimate) as refused:
        adapted_modules(shape, targets)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_no_pattern_takes_for_ever() -> None:
    """Python's own engine would try about 2 ** 30 ways of each of them, for every name."""
    for written in (r"(\w+\.?)+!", r"(a|a|\w|.)*!", r"(.*)*(.*)*(.*)*x!", r"(\w+)+\.(\w+)+\.(\w+)+!"):
        with pytest.raises(InvalidEstimate, match="matches no module"):
            adapted_modules(LLAMA, written)


def test_targets_of_some_layers_only_are_reported() -> None:
    roles, notes = adapted_modules(LLAMA, ("layers.3.self_attn.q_proj", "o_proj", "nope"))
    assert roles == {"q", "o"}
    assert notes == (
        "LoRA target nope matches no module of llama, and is ignored",
        "the LoRA targets are in some layers only, and are estimated as if in all: q_proj",
    )


def test_adapters_at_the_ends_are_counted() -> None:
    ask = EstimateOptions(targets=("q_proj",), length=512, precision="bf16-autocast", dropout=0.0)
    bare = estimate(LLAMA, ask)
    ends = LLAMA.vocabulary + LLAMA.hidden
    head = estimate(LLAMA, replace(ask, targets=("q_proj", "lm_head")))
    both = estimate(LLAMA, replace(ask, targets=("q_proj", "lm_head", "embed_tokens")))
    assert head.trainable - bare.trainable == both.trainable - head.trainable == 16 * ends
    assert bare.peak_allocated < head.peak_allocated < both.peak_allocated
    again = estimate(LLAMA, replace(ask, targets=("embed_tokens",), accumulated=True, checkpointing=True))
    assert again.trainable == 16 * ends
    assert again.by_category["gradients"] >= 4 * again.trainable


def test_a_jobs_targets_are_chosen_in_the_same_way() -> None:
    def roles(shape: ModelShape, targets: str) -> frozenset[str]:
        return adapted(Workload(shape=shape, method="lora", lora_targets=targets), shape)

    assert roles(GPT2, "mlp.c_proj") == {"proj"}
    assert roles(LLAMA, "lm_head,q_proj") == {"head", "q"}
    assert roles(T5, "lm_head,q") == {"q", "cross q"}
    assert not roles(LLAMA, "wq")
