"""The hub, by those who will use it: transformers in a process of its own, and our own check of a model."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from broker.domain.errors import InvalidInput
from broker.model_catalog.decoder_shape import shape_of
from broker.preflight.model_lookup import HubClient
from tests.clouds.hub import Hub

MODEL = "owner/tiny"
LOAD = """
import json, sys
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
name = sys.argv[1]
config = AutoConfig.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
folder = snapshot_download(name)
print(json.dumps([config.hidden_size, tokenizer("a b")["input_ids"], model.num_parameters(), folder]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama and its tokenizer, saved as people publish them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
async def hub(model: Path) -> AsyncIterator[Hub]:
    async with Hub({MODEL: model}) as hub:
        yield hub


async def test_transformers_loads_a_model_from_it(hub: Hub, model: Path, tmp_path: Path) -> None:
    import asyncio

    environment = {
        "PATH": os.environ["PATH"], "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HOME": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", LOAD, MODEL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    hidden, tokens, parameters, folder = json.loads(done.stdout.splitlines()[-1])
    assert (hidden, tokens) == (16, [2, 3])
    assert parameters > 0
    assert Path(folder, "model.safetensors").read_bytes() == Path(model, "model.safetensors").read_bytes()


async def test_the_preflight_reads_a_models_shape_from_it(hub: Hub) -> None:
    client = HubClient(endpoint=hub.url)
    assert shape_of(MODEL, await client.config(MODEL)).hidden == 16
    with pytest.raises(InvalidInput, match="the Hub has no 'owner/other'"):
        await client.config("owner/other")


async def test_parts_of_a_file_can_be_read(hub: Hub, model: Path) -> None:
    whole = Path(model, "model.safetensors").read_bytes()
    async with aiohttp.ClientSession(hub.url) as session:
        path = f"/{MODEL}/resolve/main/model.safetensors"
        async with session.get(path, headers={"Range": "bytes=100-199"}) as answer:
            assert (answer.status, await answer.read()) == (206, whole[100:200])
        async with session.head(path) as answer:
            assert int(answer.headers["Content-Length"]) == len(whole)
            assert len(answer.headers["X-Repo-Commit"]) == 40
        async with session.get(f"/{MODEL}/resolve/main/../../config.json") as answer:
            assert answer.status == 404
