"""Results: their card, the merged model, and the places that they are copied to after they are safe."""

import json
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from tests.grants.gate import gated
from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.hub import TOKEN, Hub
from tests.trainer.support.tiny_jobs import KINDS
from tests.trainer.support.token_store import store_url
from trainer.agent import deliver_results as deliver
from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import object_keys as keys
from trainer.contract.checkpoint_format import Rate
from trainer.contract.documents import Cost, ExitCode
from trainer.contract.output import OutputConfig
from trainer.contract.train import TrainConfig
from trainer.core.ipc import WorkerJob
from trainer.objectstore.objects import Objects, connect
from trainer.publish import __main__ as publish_main
from trainer.publish import publisher as publish
from trainer.training import model_card as card

RESULTS = {
    "adapter/adapter_model.safetensors": b"weights", "adapter/adapter_config.json": b"{}", "README.md": b"# card",
    "eval.json": b"{}", "metrics.jsonl": b"{}\n", "samples.json": b"[]",
}  # fmt: skip
ORIGIN = Origin(job="job", attempt="a", kind="train")


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open(store_url(tmp_path), {}, "inst")


async def committed(objects: Objects, folder: Path) -> str:
    """Return a complete checkpoint's manifest."""
    for name, content in (RESULTS | {"model.safetensors": b"for resuming", "state.json": b"{}"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    key, _ = await checkpoint.commit(objects, ORIGIN, folder, step=3, complete=True, taken_s=0.0)
    return key


async def delivered(
    objects: Objects, folder: Path, hub: Hub, output: dict[str, Any], **secrets: str
) -> tuple[str, list[str]]:
    """Deliver committed results; return why that failed, and the reported messages with their kinds."""
    key, told = await committed(objects, folder / "made"), list[str]()
    why = await deliver.deliver(
        objects, key, OutputConfig.model_validate(output), folder=folder / "results", job="job", secrets=secrets,
        endpoint=hub.url, report=lambda kind, message: told.append(f"{kind}: {message}"), pauses_s=(0.0, 0.0),
    )  # fmt: skip
    assert await deliver.verified(objects, key), "the results stay"
    return why, told


async def test_results_are_pushed_to_a_private_repository(objects: Objects, tmp_path: Path, hub: Hub) -> None:
    why, told = await delivered(objects, tmp_path, hub, {"push": {"repo": "me/tuned"}}, HF_TOKEN=TOKEN)
    assert why == "", why
    assert hub.private == {"me/tuned": True}
    assert hub.files == {name.removeprefix("adapter/"): content for name, content in RESULTS.items()}
    assert told[0].startswith("published: the results were pushed to http://127.0.0.1:")


async def test_private_results_are_not_pushed_to_public_repositories(
    objects: Objects, tmp_path: Path, hub: Hub
) -> None:
    hub.private["me/tuned"] = False
    why, _ = await delivered(objects, tmp_path, hub, {"push": {"repo": "me/tuned"}}, HF_TOKEN=TOKEN)
    assert "output.push: me/tuned is public; make it private, or set private to false" in why
    assert not hub.files
    wanted = {"push": {"repo": "me/tuned", "private": False}}
    why, _ = await delivered(objects, tmp_path / "again", hub, wanted, HF_TOKEN=TOKEN)
    assert why == ""
    assert hub.files


async def test_only_results_are_copied(tmp_path: Path) -> None:
    """The output folder of a standalone run also contains its store with the data set, which is not copied."""
    copying = OutputConfig.model_validate({"copy_to": {"url": (tmp_path / "other").as_uri()}})
    for name, content in (RESULTS | {"store/inst/data": b"private rows", "notes.txt": b""}).items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(content)
    done, failed = await publish.publish(tmp_path / "out", copying, job="job", secrets={}, endpoint=None)
    assert (len(done), failed) == (1, [])
    found = [p for p in (tmp_path / "other" / "job").rglob("*") if p.is_file()]
    assert {p.relative_to(tmp_path / "other" / "job").as_posix() for p in found} == RESULTS.keys()
    done, failed = await publish.publish(tmp_path / "absent", copying, job="job", secrets={}, endpoint=None)
    assert done == []
    assert "give the folder of a job's results" in failed[0]


async def test_a_hub_that_fails_is_asked_again(objects: Objects, tmp_path: Path, hub: Hub) -> None:
    hub.refusals = 2
    why, _ = await delivered(objects, tmp_path, hub, {"push": {"repo": "me/tuned"}}, HF_TOKEN=TOKEN)
    assert why == ""
    assert set(hub.files) == {name.removeprefix("adapter/") for name in RESULTS}


async def test_a_push_that_is_refused_costs_no_result_and_no_copy(objects: Objects, tmp_path: Path, hub: Hub) -> None:
    output = {"push": {"repo": "me/tuned"}, "copy_to": {"url": (tmp_path / "other").as_uri()}}
    why, told = await delivered(objects, tmp_path, hub, output, HF_TOKEN="hf_wrong_secret_value")
    assert "output.push: me/tuned" in why
    assert "check the token in HF_TOKEN" in why
    assert "The results are safe: fetch them" in why
    assert "hf_wrong_secret_value" not in why + "".join(told)
    assert [line.split(":")[0] for line in told] == ["published", "not_published"]
    copied = {
        p.relative_to(tmp_path / "other" / "job").as_posix(): p for p in (tmp_path / "other").rglob("*") if p.is_file()
    }
    assert {name: path.read_bytes() for name, path in copied.items()} == RESULTS


async def test_results_are_copied_to_a_bucket_by_its_own_credentials(
    objects: Objects, tmp_path: Path, hub: Hub
) -> None:
    async with gated() as gate:
        output = {"copy_to": {"url": f"{gate.place}/done", "secret": "MY_S3"}}
        why, told = await delivered(objects, tmp_path, hub, output, MY_S3=json.dumps(gate.options()))
        assert why == "", why
        assert told == [f"published: the results were copied to {gate.place}/done/job/"]
        bucket = connect(f"{gate.place}/done/job", gate.options())
        met = [meta["path"] for batch in await obstore.list(bucket).collect_async() for meta in [batch]]
        found = {name: bytes(await (await obstore.get_async(bucket, name)).bytes_async()) for name in met}
        assert found == RESULTS

        wrong = {**gate.options(), "aws_access_key_id": "AKIANOBODY"}
        why, told = await delivered(objects, tmp_path / "again", hub, output, MY_S3=json.dumps(wrong))
        assert f"output.copy_to: {gate.place}/done (" in why
        assert "check the secret MY_S3" in why
        assert "hidden-from-instances" not in why


async def test_invalid_credentials_are_reported(tmp_path: Path) -> None:
    output = OutputConfig.model_validate({"copy_to": {"url": "s3://bucket/x", "secret": "MY_S3"}})
    done, failed = await publish.publish(tmp_path, output, job="j", secrets={"MY_S3": "[secret"}, endpoint=None)
    assert done == []
    assert failed == ["output.copy_to: secret MY_S3 is not a JSON object of the store's options"]


def test_a_configuration_without_output_publishes_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "train.json"
    spec.write_text(json.dumps({"model": "a/b", "data": {"path": "a.csv", "completion": "{a}"}}))
    assert publish_main.main([str(tmp_path), "--config", str(spec)]) == 64
    said = "output: has neither push nor copy_to; name where the results go"
    assert capsys.readouterr().err == f"{spec}: {said}\n"


def test_fewer_steps_than_are_done_are_noticed(tmp_path: Path) -> None:
    kind = KINDS["causal_lm lora"]
    train = tiny_jobs.train(kind, tmp_path / "model").model_copy(update={"max_steps": 3, "eval_every_steps": None})
    data = tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    done = workers.finished(tmp_path / "run", train, data)
    shorter = train.model_copy(update={"max_steps": 2})
    again = workers.Worker(tmp_path / "again", shorter, data, restore=done)
    completed = subprocess.run(
        [sys.executable, "-m", "trainer.training.worker", str(again.run.root)], capture_output=True, text=True,
        timeout=workers.HANGS_S,
    )  # fmt: skip
    assert completed.returncode == ExitCode.COMPLETED, completed.stderr[-2000:]
    assert "notice: max_steps or epochs give 2 steps, and 3 are done" in completed.stdout


async def test_results_with_a_file_gone_do_not_count(objects: Objects, tmp_path: Path) -> None:
    key = await committed(objects, tmp_path / "made")
    assert await deliver.verified(objects, key)
    await objects.delete(keys.files_prefix(key) + "adapter/adapter_model.safetensors")
    assert not await deliver.verified(objects, key)


def test_the_card_has_the_cost_so_far(tmp_path: Path) -> None:
    kind = KINDS["causal_lm lora"]
    cost = Cost(before=Decimal("1.5"), per_hour=Decimal("2"))
    job = WorkerJob(
        train=tiny_jobs.train(kind, tmp_path / "model"), data="d", data_format="csv", number=2, save_every_s=1,
        cost=cost, began=time.time() - 1800,
    )  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "attempt": 1}\n{"step": 2, "attempt": 2}\n')
    text = card.text(job, metrics=metrics, scores={}, made_on="1 x cpu", rate=Rate(lr=1e-4))
    assert "| cost | about 2.50" in text
    assert "USD, 1.5000 of it before the last attempt |" in text
    assert "| learning rate | 0.0001, set by the job |" in text


def test_a_rate_that_was_chosen_stays_through_a_resume(tmp_path: Path) -> None:
    kind = KINDS["causal_lm lora"]
    made = tiny_jobs.train(kind, tmp_path / "model").model_dump()
    changes = {"max_steps": 2, "samples": {}, "optim": {}, "eval_every_steps": None}
    train = TrainConfig.model_validate({**made, **changes, "data": {**made["data"], "eval_share": 0.0}})
    data = tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    first = workers.Worker(tmp_path / "first", train, data)
    first.run.drain.touch()
    assert first.start().end().code == ExitCode.DRAINED
    state = json.loads((first.last / "state.json").read_text())
    assert state["rate"]["source"].startswith("Schulman")
    state["rate"] = {"lr": 0.0125, "source": "an earlier table"}
    (first.last / "state.json").write_text(json.dumps(state))
    last = workers.Worker(tmp_path / "last", train, data, restore=first.last).start()
    assert last.end().code == ExitCode.COMPLETED
    rows = [json.loads(line) for line in (last.last / "metrics.jsonl").read_text().splitlines()]
    assert max(row["lr"] for row in rows) == 0.0125
    assert "optim.lr auto: 0.0125, as before (an earlier table)" in last.run.messages_file.read_text()


def test_a_finished_lora_has_its_card_and_the_merged_model(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = KINDS["causal_lm lora"]
    made = tiny_jobs.train(kind, tmp_path / "model").model_dump()
    changes = {"output": {"merge": True}, "max_steps": 3, "samples": {}, "optim": {}}
    train = TrainConfig.model_validate({**made, **changes})
    data = tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    done = workers.finished(tmp_path / "run", train, data)

    card = (done / "README.md").read_text()
    after = json.loads((done / "eval.json").read_text())["heldout_loss_after"]
    assert f"{after:.4f} |" in card
    assert "| 1 | 1 to 3 |" in card
    assert "| torch | 2." in card
    assert "| learning rate | 0.000422, Schulman et al. 2025" in card
    assert "| cost | unknown |" in card
    assert str(tmp_path) not in card

    assert AutoTokenizer.from_pretrained(done / "adapter")("w5 w6").input_ids == [8, 9]
    settings = done / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": train.model}))
    adapted = AutoPeftModelForCausalLM.from_pretrained(done / "adapter", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(done / "model", dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-4)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-4)
