"""Each wrong input gets one line that names the place and the fix, and leaves nothing behind."""

import gzip
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from broker.api.app import APIS
from broker.api.schemas.tenancy import SecretValue
from broker.cli.main import app
from broker.daemon.config import DaemonConfig
from broker.runtime.clock import SystemClock
from tests.api.harness import CSV, Running, memory_blobs, serving, spec
from tests.support.memory_store.store import MemoryStore
from trainer.contract.base import PATTERN_MESSAGES


@pytest.fixture
async def memory_api() -> AsyncIterator[Running]:
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as running:
        yield running


Change = Callable[[dict[str, Any]], None]


def train(**values: Any) -> Change:
    return lambda body: body["train"].update(values)


def data(**values: Any) -> Change:
    return lambda body: body["train"]["data"].update(values)


def top(**values: Any) -> Change:
    return lambda body: body.update(values)


CASES: list[tuple[str, Change, str, str]] = [
    ("unknown key", train(epoch=2), "train.epoch", "did you mean epochs?"),
    ("unknown key in a list of choices", train(method={"kind": "lora", "rank": 8}), "train.method.rank", "use one of"),
    ("unknown key at the top", top(lables={}), "lables", "did you mean labels?"),
    ("wrong type", train(epochs="three"), "train.epochs", 'must be a valid number, not "three"'),
    ("number as text", train(micro_batch="4"), "train.micro_batch", 'must be a valid integer, not "4"'),
    ("neither of a union", top(resources={"gpus": "many"}), "resources.gpus", "or must be 'auto'"),
    ("too large", train(micro_batch=5000), "train.micro_batch", "less than or equal to 4096"),
    ("missing key", lambda b: b["train"].pop("model"), "train.model", "is missing; add it"),
    (
        "batches do not divide",
        train(micro_batch=4, global_batch=6),
        "train",
        "micro_batch 4 does not divide global_batch 6",
    ),
    ("missing column", data(completion="{meaning}"), "train.data.completion", "no column 'meaning'"),
    ("broken template", data(prompt="Define {word:"), "train.data.prompt", "write {column}"),
    ("no upload", data(path="words.csv"), "train.data.path", "upload the file first, as `gpubroker submit` does"),
    ("unknown upload", data(path="upload:" + "0" * 64), "train.data.path", "no upload 000000000000... of yours"),
    ("another format", data(format="json"), "train.data.format", "was read as csv"),
    ("unknown model", train(model="nobody/nothing"), "train.model", "'nobody/nothing'"),
    ("code that is not listed", train(trust_remote_code=True), "train.trust_remote_code", "trainer.remote_code of gpu"),
    ("secret not set", top(secrets=["HF_TOKEN"]), "secrets.0", "gpubroker secret set HF_TOKEN"),
    ("unknown provider", top(resources={"providers": ["simulate"]}), "resources.providers.0", "mean simulated?"),
    ("unknown accelerator", top(resources={"accelerators": ["l40z"]}), "resources.accelerators.0", "mean l40s?"),
    ("empty", train(model=""), "train.model", 'must have at least 1 character, not ""'),
    ("too long", train(model="a" * 2000), "train.model", "must have at most 1024 characters"),
    ("too many", top(secrets=["A"] * 65), "secrets", "must have at most 64 items"),
    ("NUL in a template", data(prompt="a\0{word}"), "train.data.prompt", "NUL"),
    ("a name that is not a path", train(model="/" + "a" * 900), "train.model", "no folder"),
    ("cap too small", top(cap_usd="0.000001"), "cap_usd", "the cheapest offer is expected to cost $"),
    ("no such origin", top(init_from="job/aaaaaaaaaaaaa"), "init_from", "no job aaaaaaaaaaaaa"),
    ("reserved name", top(env={"GPUBROKER_X": "1"}), "body", "GPUBROKER_X"),
    ("NUL", top(env={"A": "a\0b"}), "env.A", "NUL"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
async def test_a_wrong_spec_is_refused(memory_api: Running, change: Change, field: str, message: str) -> None:
    me = await memory_api.token("ada")
    body = spec((await memory_api.upload(me))["ref"])
    change(body)
    refused = await memory_api.call("POST", "/v1/jobs", me, 422, json=body)
    messages = {e["field"]: e["message"] for e in refused["errors"]}
    assert message in messages[field]
    assert "\n" not in messages[field]
    assert len(refused["errors"]) == 1
    assert (await memory_api.call("GET", "/v1/jobs", me, 200))["items"] == []
    assert await memory_api.service.blobs.list("jobs/") == []


async def test_everything_wrong_is_reported_at_once(memory_api: Running) -> None:
    me = await memory_api.token("ada")
    body = spec((await memory_api.upload(me))["ref"], secrets=["HF_TOKEN"], resources={"providers": ["nimbus"]})
    body["train"]["data"]["prompt"] = "{nope}"
    refused = await memory_api.call("POST", "/v1/jobs", me, 422, json=body)
    assert [e["field"] for e in refused["errors"]] == ["resources.providers.0", "secrets.0", "train.data.prompt"]
    assert refused["detail"] == "3 fields are wrong; see errors"


async def test_values_that_may_be_secret_are_not_repeated(memory_api: Running) -> None:
    me = await memory_api.token("ada")
    ref = (await memory_api.upload(me))["ref"]
    wrong: list[dict[str, Any]] = [
        {"secrets": "hf_verysecret"},
        {"secrets": ["hf-verysecret"]},
        {"env": {"A": ["hf_verysecret"]}},
    ]
    for change in wrong:
        refused = await memory_api.call("POST", "/v1/jobs", me, 422, json=spec(ref, **change))
        assert "verysecret" not in json.dumps(refused)
    refused = await memory_api.call("PUT", "/v1/secrets/A", me, 422, json={"value": "hf_verysecret" + "\0"})
    assert "verysecret" not in json.dumps(refused)
    allowed = SecretValue.model_json_schema()["properties"]["value"]["pattern"]
    assert re.match(allowed, "two\nlines")
    assert not re.match(allowed, "hf_verysecret\0"), "the schema must not allow what is refused"


UPLOADS = [
    ("empty", "words.csv", "", "the file is empty"),
    ("header only", "words.csv", "a,b\n", "give at least one row"),
    ("ragged", "words.csv", "a,b\n1,2,3\n", "more cells than the header's 2"),
    ("not UTF-8", "words.csv", b"a,b\n\xff\xfe,1\n", "save the file as UTF-8"),
    ("not JSON", "words.json", "[{", "not JSON"),
    ("no list", "words.json", '{"a": 1}', "must be a list of objects"),
    ("broken line", "words.jsonl", '{"a": 1}\n{"a"\n', "line 2: not JSON"),
    ("no archive", "code.tar", "hello", "is not a tar archive"),
    ("an archive cut off", "code.tar", gzip.compress(bytes(4096), mtime=0)[:12], "is not a tar archive"),
    ("no zip", "pets.zip", "hello", "is not a .zip that can be read"),
    ("unknown ending", "words.xls", CSV, "add format=csv"),
]


@pytest.mark.parametrize(("name", "content", "message"), [u[1:] for u in UPLOADS], ids=[u[0] for u in UPLOADS])
async def test_a_wrong_upload_is_refused(memory_api: Running, name: str, content: str | bytes, message: str) -> None:
    headers = await memory_api.token("ada") | {"Content-Type": "application/octet-stream"}
    raw = content if isinstance(content, bytes) else content.encode()
    refused = await memory_api.call("POST", f"/v1/uploads?name={name}", headers, 422, data=raw)
    assert message in refused["errors"][0]["message"]
    assert await memory_api.service.blobs.list("uploads/") == []


async def test_an_upload_over_the_limit_is_refused_while_it_streams(memory_api: Running) -> None:
    headers = await memory_api.token("ada") | {"Content-Type": "application/octet-stream"}
    limit = memory_api.service.settings.upload_bytes

    async def body() -> AsyncIterator[bytes]:
        for _ in range(limit // 1000 + 1):
            yield b"x" * 1000

    refused = await memory_api.call("POST", "/v1/uploads?name=a.csv", headers, 413, data=body())
    assert str(limit) in refused["detail"]
    assert await memory_api.service.blobs.list("uploads/") == []


async def test_a_script_needs_an_archive_and_training_a_data_set(memory_api: Running) -> None:
    me = await memory_api.token("ada")
    ref = (await memory_api.upload(me))["ref"]
    script = {"name": "s", "cap_usd": 1, "script": {"code": ref, "command": ["python", "x.py"]}}
    refused = await memory_api.call("POST", "/v1/jobs", me, 422, json=script)
    assert refused["errors"] == [
        {"field": "script.code", "message": "words.csv is not a .tar archive of code; upload one"}
    ]


BODIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/teams", {"name": "A B"}, "name", 'must be 1 to 63 of a-z, 0-9 and -, with no - at an end, not "A B"'),
    ("/v1/tokens", {"owner": "a", "scopes": []}, "scopes", "must have at least 1 item"),
    ("/v1/tokens", {"owner": "a", "scopes": ["x"]}, "scopes.0", "must be 'read', 'submit', 'manage', 'metrics' or"),
]


@pytest.mark.parametrize(("path", "body", "field", "message"), BODIES)
async def test_a_wrong_body_is_reported_in_words_and_once(
    memory_api: Running, path: str, body: dict[str, Any], field: str, message: str
) -> None:
    refused = await memory_api.call("POST", path, await memory_api.token("ada", "admin"), 422, json=body)
    (problem,) = refused["errors"]
    assert problem["field"] == field
    assert problem["message"].startswith(message)


NOWHERE = [
    ("GET", "/v1/jobs/aaaaaaaaaaaaa", "no job aaaaaaaaaaaaa; `gpubroker ls` lists yours"),
    ("DELETE", "/v1/secrets/NOPE", "no secret NOPE; `gpubroker secret ls` lists yours"),
    ("DELETE", "/v1/teams/nope", "no team nope; `gpubroker team ls` lists them"),
    ("DELETE", "/v1/tokens/aaaaaaaa", "no token aaaaaaaa; `gpubroker token ls` lists them"),
    ("DELETE", "/v1/policies/nope", "no policy nope; `gpubroker policy ls` lists them"),
    ("GET", "/v1/policies/nope/history", "no policy named nope; `gpubroker policy ls` lists them"),
    ("DELETE", "/v1/channels/aaaaaaaaaaaaa", "no channel aaaaaaaaaaaaa; `gpubroker channel ls` lists yours"),
    ("DELETE", "/v1/slack/users/U0NOPE", "no link of U0NOPE; `gpubroker slack ls` lists them"),
]


@pytest.mark.parametrize(("method", "path", "expected_detail"), NOWHERE)
async def test_a_404_names_the_command_that_lists_such_objects(
    memory_api: Running, method: str, path: str, expected_detail: str
) -> None:
    """The message names a command that exists. Every reader, over HTTP or gRPC, can use a command; only programs can
    use routes.
    """
    refused = await memory_api.call(method, path, await memory_api.token("ada", "admin", "manage", "submit"), 404)
    assert refused["detail"] == expected_detail
    command = re.findall(r"`gpubroker ([a-z ]+)`", expected_detail)[0]
    assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0


WORDED = ("^(?!^[-+.]*$)", "^[^\\u0000]*$", "^[0-9]{1,3}[dhms]$")
"""Beginnings of the patterns of decimals, texts without NUL and ages, which have messages of their own checks."""


def patterns(schema: Any) -> Iterator[str]:
    """Yield the patterns that texts of a schema must match, at any depth."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str) and not schema["pattern"].startswith(WORDED):
            yield schema["pattern"]
        yield from (pattern for inner in schema.values() for pattern in patterns(inner))
    elif isinstance(schema, list):
        yield from (pattern for inner in schema for pattern in patterns(inner))


def test_refusals_never_quote_a_regular_expression() -> None:
    operations = [operation for api in APIS for operation in api.operations]
    models: list[type[BaseModel]] = [DaemonConfig]
    models += [model for one in operations for model in (one.body, one.query) if model is not None]
    names = [kind.json_schema() for one in operations for kind in one.params.values()]
    used_patterns = {*patterns([model.model_json_schema() for model in models]), *patterns(names)}
    assert len(used_patterns) > 10
    assert not used_patterns - PATTERN_MESSAGES.keys()


PROTOCOL: list[tuple[str, str, int, dict[str, Any]]] = [
    ("GET", "/nowhere", 404, {}),
    ("DELETE", "/v1/jobs", 405, {}),
    ("POST", "/v1/jobs", 415, {"data": b"name: x", "headers": {"Content-Type": "application/yaml"}}),
    ("POST", "/v1/jobs", 400, {"data": b"{", "headers": {"Content-Type": "application/json"}}),
    ("POST", "/v1/jobs", 413, {"data": b" " * 5_000_000, "headers": {"Content-Type": "application/json"}}),
    ("POST", "/v1/jobs", 422, {"data": b"[]", "headers": {"Content-Type": "application/json"}}),
    ("POST", "/v1/uploads?name=a.csv", 415, {"data": b"a", "headers": {"Content-Type": "text/csv"}}),
    ("GET", "/v1/jobs/NOPE", 422, {}),
    ("GET", "/v1/jobs?limit=0", 422, {}),
    ("GET", "/v1/jobs?limit=1&limit=2", 422, {}),
    ("GET", "/v1/jobs?lable=a:b", 422, {}),
    ("GET", "/v1/jobs?cursor=x", 422, {}),
    ("GET", "/v1/jobs?cursor=MjAyNi0wMS0wMVQwMDowMDowMCAA", 422, {}),  # ends with a NUL
    ("GET", "/v1/jobs?since=yesterday", 422, {}),
    ("GET", "/v1/jobs?since=9999-12-31T23:59:59-23:59", 422, {}),
    ("GET", "/v1/jobs?until=0001-01-01T00:00:00%2B23:00", 422, {}),
    ("GET", "/v1/spend?until=0001-01-02T00:00:00Z", 422, {}),
    ("GET", "/v1/calibration?since=2020-01-01T00:00:00Z", 422, {}),
]


@pytest.mark.parametrize(("method", "path", "status", "options"), PROTOCOL)
async def test_protocol_errors_are_problem_documents(
    memory_api: Running, method: str, path: str, status: int, options: dict[str, Any]
) -> None:
    headers = await memory_api.token("ada") | options.get("headers", {})
    url = memory_api.url + path
    async with memory_api.http.request(method, url, headers=headers, data=options.get("data")) as response:
        assert response.status == status
        assert response.content_type == "application/problem+json"
        problem = await response.json()
    assert problem["status"] == status
    assert problem["detail"]
    assert "\n" not in problem["detail"]
