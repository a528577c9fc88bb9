"""Benches, a Hub, and tiny models built from their configuration classes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.support.harness import Bench
from tests.trainer.support.hub import Hub, serve

WORDS = 4000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a Hub with the LFS protocol, which the client speaks if Xet is switched off."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub = Hub()
    server = serve(hub)
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny models. `lora`: a Llama; `full`: a GPT-2 with dropout everywhere, whose save takes a moment."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(WORDS - 2)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=0,
            bos_token_id=None,
        )
    )
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_embd=192,
            n_layer=1,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.2,
            embd_pdrop=0.2,
            attn_pdrop=0.2,
            eos_token_id=0,
            bos_token_id=0,
        )
    )
    made = {}
    for name, model in (("lora", llama), ("full", gpt2)):
        made[name] = tmp_path_factory.mktemp("model") / name
        model.save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


def rows(count: int = 60) -> bytes:
    """Return a CSV of `word` and `meaning`, in the tiny tokenizer's words, of uneven lengths."""
    lines = ["word,meaning"]
    lines += [f"w{i},{' '.join(f'w{(i * 7 + j * j) % 90}' for j in range(1 + i % 9))}" for i in range(count)]
    return "\n".join(lines).encode()
