"""Parameter counts equal the published counts of the same models, in rounded billions, within one percent."""

import pytest

from broker.model_catalog import catalog as catalogue
from broker.model_catalog.parameter_count import parameters

BILLIONS = {
    "bigcode/gpt_bigcode-santacoder": 1.12, "bigcode/starcoder": 15.52, "bigcode/starcoder2-15b": 15.96,
    "bigcode/starcoder2-3b": 3.03, "bigcode/starcoder2-7b": 7.17, "bigcode/starcoderbase-1b": 1.137,
    "distilbert/distilbert-base-uncased": 0.067, "EleutherAI/gpt-neox-20b": 20.55, "EleutherAI/pythia-1.4b": 1.415,
    "EleutherAI/pythia-12b": 11.85, "EleutherAI/pythia-160m": 0.1623, "EleutherAI/pythia-410m": 0.4053,
    "EleutherAI/pythia-6.9b": 6.857, "facebook/bart-base": 0.1394, "facebook/bart-large": 0.4063,
    "facebook/bart-large-cnn": 0.4063, "FacebookAI/roberta-base": 0.125, "FacebookAI/roberta-large": 0.355,
    "google-bert/bert-base-cased": 0.1083, "google-bert/bert-base-uncased": 0.1101,
    "google-bert/bert-large-uncased": 0.3362, "google-t5/t5-3b": 2.852, "google-t5/t5-base": 0.2229,
    "google-t5/t5-large": 0.7377, "google-t5/t5-small": 0.0605,
    "google/flan-t5-base": 0.2476, "google/flan-t5-large": 0.7832, "google/flan-t5-small": 0.077,
    "google/flan-t5-xl": 2.85, "google/flan-t5-xxl": 11.14, "google/gemma-2-27b": 27.23, "google/gemma-2-2b": 2.614,
    "google/gemma-2-9b": 9.242, "google/gemma-2b": 2.506, "google/gemma-3-12b-pt": 12.19, "google/gemma-3-1b-pt": 1.0,
    "google/gemma-3-270m": 0.268, "google/gemma-3-27b-pt": 27.43, "google/gemma-3-4b-pt": 4.3, "google/gemma-7b": 8.54,
    "google/vit-base-patch16-224": 0.0866, "google/vit-base-patch16-224-in21k": 0.0864,
    "google/vit-large-patch16-224": 0.3043, "HuggingFaceTB/SmolLM-1.7B": 1.711, "HuggingFaceTB/SmolLM-135M": 0.1345,
    "HuggingFaceTB/SmolLM-360M": 0.3618, "HuggingFaceTB/SmolLM2-1.7B": 1.711, "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "HuggingFaceTB/SmolLM2-360M": 0.3618, "HuggingFaceTB/SmolLM3-3B": 3.075, "meta-llama/Llama-2-13b-hf": 13.02,
    "meta-llama/Llama-2-70b-hf": 68.98, "meta-llama/Llama-2-7b-hf": 6.738, "meta-llama/Llama-3.1-405B": 405.9,
    "meta-llama/Llama-3.1-70B": 70.55, "meta-llama/Llama-3.1-8B": 8.03, "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213, "meta-llama/Meta-Llama-3-70B": 70.55, "meta-llama/Meta-Llama-3-8B": 8.03,
    "microsoft/phi-1_5": 1.418, "microsoft/phi-2": 2.78, "microsoft/Phi-3-medium-4k-instruct": 13.96,
    "microsoft/Phi-3-mini-4k-instruct": 3.821, "microsoft/Phi-3.5-mini-instruct": 3.821, "microsoft/phi-4": 14.66,
    "mistralai/Mistral-7B-Instruct-v0.2": 7.242, "mistralai/Mistral-7B-v0.1": 7.242, "mistralai/Mistral-7B-v0.3": 7.248,
    "mistralai/Mistral-Nemo-Base-2407": 12.25, "mistralai/Mistral-Small-24B-Base-2501": 23.57,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140.6, "mistralai/Mixtral-8x22B-v0.1": 140.6,
    "mistralai/Mixtral-8x7B-v0.1": 46.7, "openai-community/gpt2": 0.1244, "openai-community/gpt2-large": 0.774,
    "openai-community/gpt2-medium": 0.3548, "openai-community/gpt2-xl": 1.558, "openai/whisper-base": 0.0726,
    "openai/whisper-large-v2": 1.543, "openai/whisper-large-v3": 1.543, "openai/whisper-large-v3-turbo": 0.809,
    "openai/whisper-medium": 0.7639, "openai/whisper-small": 0.2417, "openai/whisper-tiny": 0.0378,
    "Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-1.5B": 1.54, "Qwen/Qwen2.5-14B": 14.77, "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-3B": 3.086, "Qwen/Qwen2.5-72B": 72.71, "Qwen/Qwen2.5-7B": 7.61, "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.721, "Qwen/Qwen3-14B": 14.77, "Qwen/Qwen3-30B-A3B": 30.53, "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-4B": 4.022, "Qwen/Qwen3-8B": 8.191, "stabilityai/stable-diffusion-xl-base-1.0": 2.567,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 0.8595, "tiiuae/falcon-40b": 41.3, "tiiuae/falcon-7b": 6.92,
    "tiiuae/Falcon3-7B-Base": 7.46, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1,
}  # fmt: skip
"""docs/reports/2026-11-27-estimation.md (Known models) lists the source of each count."""
FAMILIES = {
    "Llama-2", "Llama-3.1", "Llama-3.2", "Mistral-7B", "Mixtral", "Qwen2.5", "Qwen3", "gemma-2b", "gemma-2-", "gemma-3",
    "phi-", "Phi-3", "falcon", "SmolLM", "starcoder2", "gpt2", "gpt-neox", "gpt_bigcode", "t5-base", "flan-t5", "bart",
    "bert-base", "roberta", "distilbert", "vit", "whisper", "stable-diffusion-v1-5", "stable-diffusion-xl",
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_a_count_is_the_published_one(name: str) -> None:
    found = catalogue.find(name)
    assert found is not None
    assert parameters(found.config) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_no_model_is_left_out() -> None:
    """A fine-tuned model has the count of its base model."""

    def count(name: str) -> int:
        found = catalogue.find(name)
        assert found is not None
        return parameters(found.config)

    assert {count(name) for name in catalogue.names()} == {count(name) for name in BILLIONS}
    assert {family for family in FAMILIES if not any(family in name for name in BILLIONS)} == set()
