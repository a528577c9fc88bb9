"""Shapes of models: counted as published, and refused with the fix."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from broker.domain.errors import InvalidInput
from broker.domain.workload import ModelShape
from broker.model_catalog import catalog as catalogue
from broker.model_catalog.decoder_shape import shape_of
from broker.model_catalog.task_shape import task_shape
from broker.preflight.model_lookup import HubClient, Unshaped, is_folder, resolve_for
from trainer.contract.train import TrainConfig


def published(name: str) -> dict[str, Any]:
    entry = catalogue.find(name)
    assert entry is not None
    return dict(entry.config)


LLAMA = published("meta-llama/Llama-3.1-8B")


async def resolve(model: str, *, hub: HubClient | None) -> ModelShape:
    """Return the shape of a decoder for language modelling."""
    train = TrainConfig.model_validate({"model": model, "data": {"path": "a.csv", "completion": "{x}"}})
    shape = await resolve_for(train, hub=hub)
    assert isinstance(shape, ModelShape)
    return shape


def test_a_shape_has_the_configs_numbers() -> None:
    shape = shape_of("x", LLAMA)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.max_positions) == (32, 8, 128, 131072)
    assert shape.known
    assert not shape_of("g", {**LLAMA, "model_type": "own"}).known


def test_the_text_part_of_a_multimodal_config_is_taken() -> None:
    text = published("google/gemma-3-1b-pt")
    assert shape_of("x", {"model_type": "gemma3", "text_config": text}).family == "gemma3_text"


@pytest.mark.parametrize(
    ("name", "intermediate", "kv_heads", "gated"),
    [
        ("openai-community/gpt2", 3072, 12, False),
        ("bigcode/starcoder", 24576, 1, False),
        ("tiiuae/falcon-7b", 18176, 1, False),
        ("tiiuae/falcon-40b", 32768, 8, False),
        ("EleutherAI/gpt-neox-20b", 24576, 64, False),
        ("google/gemma-2-2b", 9216, 4, True),
    ],
)
def test_older_families_have_names_of_their_own(name: str, intermediate: int, kv_heads: int, gated: bool) -> None:
    shape = shape_of(name, published(name))
    assert (shape.intermediate, shape.kv_heads, shape.gated_mlp) == (intermediate, kv_heads, gated)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "bert"}, "is an encoder"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": 0}, "no positive hidden_size"),
        ({"num_hidden_layers": 0}, "no positive num_hidden_layers"),
        ({"vocab_size": "many"}, "no positive vocab_size"),
        ({"num_attention_heads": True}, "no positive num_attention_heads"),
        ({"head_dim": "wide"}, "no positive head_dim"),
        ({"num_key_value_heads": -1}, "no positive num_key_value_heads"),
    ],
)
def test_configs_other_than_plain_decoders_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        shape_of("x", {**LLAMA, **changes})
    assert caught.value.problems[0].field == "train.model"


def folder(path: Path, *names: str, config: str = json.dumps(LLAMA)) -> str:
    for name in names:
        (path / name).write_text(config if name == "config.json" else "")
    return str(path)


async def test_a_folder_of_this_machine(tmp_path: Path) -> None:
    path = folder(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    assert is_folder(path)
    assert (await resolve(path, hub=None)).parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "has no config.json, \\*.safetensors, tokenizer\\*"),
        (("config.json", "tokenizer.json"), "has no \\*.safetensors"),
    ],
)
async def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        await resolve(folder(tmp_path, *names), hub=None)


@pytest.mark.parametrize("config", ["nope", "[1]", "[" * 100_000])
async def test_a_folder_with_a_broken_config(tmp_path: Path, config: str) -> None:
    path = folder(tmp_path, "config.json", "model.safetensors", "tokenizer.json", config=config)
    with pytest.raises(InvalidInput, match="not a JSON object"):
        await resolve(path, hub=None)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/folder", "no folder"),
        ("gpt2 with spaces", "neither a folder nor a Hub id"),
        ("../x/../y", "no folder"),
        ("owner/unheard-of", "not in the bundled catalogue"),
    ],
)
async def test_an_unknown_model_without_a_hub(model: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        await resolve(model, hub=None)


class Hub:
    """Hub on loopback that returns the configured answer and records the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.status, self.body = 200, json.dumps(LLAMA)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=self.status, text=self.body)


@pytest.fixture
async def hub() -> AsyncIterator[tuple[Hub, str]]:
    fake = Hub()
    app = web.Application()
    app.router.add_get("/{path:.*}", fake.answer)
    async with TestServer(app) as server:
        yield fake, str(server.make_url("/"))


async def test_the_hub_is_asked_once_with_the_token(hub: tuple[Hub, str]) -> None:
    fake, url = hub
    client = HubClient(endpoint=url, token="secret")
    for _ in range(2):
        shape = await resolve("owner/new", hub=client)
        assert (shape.parameters, shape.bundled) == (8_030_261_248, False)
    assert fake.asked == [("/owner/new/resolve/main/config.json", "Bearer secret")]


async def test_a_config_that_comes_in_several_pieces_is_read_whole(hub: tuple[Hub, str]) -> None:
    fake, url = hub
    fake.body = json.dumps({"notes": "x" * 800_000, **LLAMA})
    assert (await resolve("owner/new", hub=HubClient(endpoint=url))).parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "gated or private, or does not exist.*HF_TOKEN"),
        (403, "accept its licence"),
        (404, "the Hub has no 'owner/new'"),
        (500, "cannot look up 'owner/new'.*answered 500; try again"),
    ],
)
async def test_refusals_of_the_hub_are_explained(hub: tuple[Hub, str], status: int, words: str) -> None:
    fake, url = hub
    fake.status = status
    with pytest.raises(InvalidInput, match=words):
        await resolve("owner/new", hub=HubClient(endpoint=url))


async def test_the_catalogue_spares_the_hub_except_for_licences(hub: tuple[Hub, str]) -> None:
    fake, url = hub
    client = HubClient(endpoint=url)
    assert (await resolve("HuggingFaceTB/SmolLM2-135M-Instruct", hub=client)).bundled
    assert fake.asked == []
    fake.status = 403
    with pytest.raises(InvalidInput, match="accept its licence"):
        await resolve("meta-llama/Llama-3.1-8B", hub=client)


async def test_the_hubs_own_variables_are_read(hub: tuple[Hub, str]) -> None:
    fake, url = hub
    await HubClient.of_environment({"HF_ENDPOINT": url, "HF_TOKEN": "confidential"}).config("owner/new")
    assert fake.asked == [("/owner/new/resolve/main/config.json", "Bearer confidential")]


async def test_a_silent_hub_leaves_the_catalogue_and_it_says_so() -> None:
    nobody = HubClient(endpoint="http://127.0.0.1:9", timeout_s=2)
    shape = await resolve("meta-llama/Llama-3.1-8B", hub=nobody)
    assert (shape.parameters, shape.bundled) == (8_030_261_248, True)
    with pytest.raises(InvalidInput, match=r"cannot look up .owner/new.: no answer"):
        await resolve("owner/new", hub=nobody)


WRITES = {"is_encoder_decoder": True}
BART = {"model_type": "bart", **WRITES}
WORDS = {"label": "y", "prompt": "{x}"}
PAIR = {"chosen": "{x}", "rejected": "{y}"}


@pytest.mark.parametrize(
    ("task", "data", "config", "found"),
    [
        ("text_classification", WORDS, {"model_type": "bert"}, ("bert", "text", 2)),
        ("text_regression", WORDS, {"model_type": "roberta", "id2label": {"0": "a"}}, ("roberta", "text", 1)),
        ("text_classification", WORDS, {"model_type": "llama", "id2label": dict.fromkeys("abc")}, ("llama", "text", 3)),
        ("text_regression", WORDS, {"model_type": "llama"}, ("llama", "text", 1)),
        ("token_classification", {"words": "x", "label": "y"}, {"model_type": "bert"}, ("bert", "words", 2)),
        ("causal_lm", {"completion": "{x}"}, {"model_type": "mixtral"}, ("mixtral", "tokens", 0)),
        ("causal_lm", {"completion": "{x}"}, {"text_config": LLAMA, "model_type": "two"}, ("llama", "tokens", 0)),
        ("dpo", PAIR, {"model_type": "llama"}, ("llama", "tokens", 0)),
        ("seq2seq", {"prompt": "{x}", "completion": "{y}"}, {"model_type": "t5", **WRITES}, ("t5", "tokens", 0)),
    ],
)
async def test_the_task_decides_the_head_of_the_model(
    task: str, data: dict[str, str], config: dict[str, Any], found: tuple[str, str, int], tmp_path: Path
) -> None:
    shape = await of_task(task, data, config, tmp_path)
    assert shape is not None
    assert (shape.family, shape.head, shape.labels) == found


@pytest.mark.parametrize(
    ("task", "data", "config"),
    [
        ("seq2seq", {"prompt": "{x}", "completion": "{y}"}, {"model_type": "pegasus", "is_encoder_decoder": True}),
        ("text_classification", WORDS, {"model_type": "deberta-v2", "hidden_size": 768}),
        ("causal_lm", {"completion": "{x}"}, {"model_type": "deepseek_v3", "n_routed_experts": 256}),
        ("causal_lm", {"completion": "{x}"}, {"model_type": "bert", "is_decoder": True}),
    ],
)
async def test_a_job_without_an_estimate_is_not_refused(
    task: str, data: dict[str, str], config: dict[str, Any], tmp_path: Path
) -> None:
    assert await of_task(task, data, config, tmp_path) is None


@pytest.mark.parametrize(
    ("task", "data", "config", "words"),
    [
        ("seq2seq", {"prompt": "{x}", "completion": "{y}"}, LLAMA, "task seq2seq takes an encoder-decoder"),
        ("text_regression", WORDS, BART, "is of the kind bart; task text_regression takes no encoder-decoder"),
        ("text_regression", WORDS, {"hidden_size": 4}, "has no model_type"),
        ("causal_lm", {"completion": "{x}"}, {"model_type": "vit"}, "vit; task causal_lm takes a model of texts"),
        ("causal_lm", {"completion": "{x}"}, {"model_type": "bert"}, "kind bert and sees what it is to predict"),
        ("dpo", PAIR, {"model_type": "electra", "hidden_size": 7}, "electra and sees .*; task dpo takes a decoder"),
        ("causal_lm", {"completion": "{x}"}, BART, "bart; task causal_lm takes no encoder-decoder, seq2seq does"),
        ("text_classification", WORDS, {"model_type": "bert", "hidden_size": 7}, "12 heads do not divide"),
        ("text_classification", WORDS, LLAMA | {"hidden_size": -1}, "no positive hidden_size"),
    ],
)
async def test_models_that_a_task_cannot_train_are_refused(
    task: str, data: dict[str, str], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=words):
        await of_task(task, data, config, tmp_path)


async def test_a_pipeline_is_known_by_its_index(hub: tuple[Hub, str], tmp_path: Path) -> None:
    data = {"path": "a.tar", "image": "image", "prompt": "{label}"}
    fake, url = hub
    for name, refused in (("StableDiffusionXLPipeline", False), ("FluxPipeline", True)):
        folder = tmp_path / name
        for file in ("unet/a.safetensors", "vae/a.safetensors", "text_encoder/a.safetensors", "tokenizer/vocab.json"):
            (folder / file).parent.mkdir(parents=True)
            (folder / file).touch()
        fake.body = json.dumps({"_class_name": name})
        (folder / "model_index.json").write_text(fake.body)
        (folder / "scheduler").mkdir()
        (folder / "scheduler/scheduler_config.json").write_text("{}")
        for model in (str(folder), f"owner/{name}"):
            train = TrainConfig.model_validate({"task": "text_to_image", "model": model, "data": data})
            client = HubClient(endpoint=url)
            if not refused:
                assert isinstance(await resolve_for(train, hub=client), Unshaped)
                continue
            with pytest.raises(InvalidInput, match="is of the kind FluxPipeline; task text_to_image takes Stable"):
                await resolve_for(train, hub=client)
    assert {path for path, _ in fake.asked} == {
        f"/owner/{name}/resolve/main/model_index.json" for name in ("StableDiffusionXLPipeline", "FluxPipeline")
    }
    (tmp_path / "FluxPipeline/model_index.json").unlink()
    with pytest.raises(InvalidInput, match=r"has no model_index\.json"):
        await resolve_for(train.model_copy(update={"model": str(tmp_path / "FluxPipeline")}), hub=None)


def test_tasks_to_come_have_their_heads_too() -> None:
    vit = task_shape("v", {"model_type": "vit"}, "image_classification")
    assert vit is not None
    assert (vit.head, vit.max_positions) == ("image", 197)
    reward = task_shape("r", LLAMA, "reward_model")
    assert reward is not None
    assert (reward.head, reward.labels) == ("text", 1)
    bare = task_shape("r", LLAMA, "causal_lm")
    assert bare is not None
    assert reward.parameters == bare.parameters - 128256 * 4096 + 4096, "a number in place of a vocabulary"
    assert task_shape("u", {"model_type": "unet"}, "text_to_image") is None
    assert task_shape("o", {"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072}, "causal_lm") is None
    with pytest.raises(InvalidInput, match="'otp' is not an architecture that is known"):
        task_shape("o", {"model_type": "otp", "hidden_size": 768, "ffn_dim": 3072}, "causal_lm")
    assert task_shape("s", {"model_type": "swin"}, "image_classification") is None
    with pytest.raises(InvalidInput, match="takes a model of images"):
        task_shape("b", {"model_type": "bert"}, "image_classification")


async def of_task(task: str, data: dict[str, str], config: dict[str, Any], tmp_path: Path) -> ModelShape | None:
    path = folder(tmp_path, "config.json", "model.safetensors", "tokenizer.json", config=json.dumps(config))
    train = TrainConfig.model_validate({"task": task, "model": path, "data": {"path": "a.csv", **data}})
    found = await resolve_for(train, hub=None)
    return found if isinstance(found, ModelShape) else None
