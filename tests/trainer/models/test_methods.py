"""Adapters over quantised bases, DoRA, and optimizers other than AdamW: exact to resume, and usable with plain peft."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainer.support import diffusion, tiny_jobs, workers
from tests.trainer.support.crews import Crew, logged_steps, tensors
from tests.trainer.support.tiny_models import llama
from tests.trainer.support.workers import HANGS_S, killed_within_a_step, stepping_loops
from trainer.contract.documents import ExitCode, Parallelism
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, QloraConfig, TrainConfig
from trainer.core.errors import UserFault
from trainer.models.base_identity import BaseIdentity, _files, identity
from trainer.optim import optimizers

STEPS = 6
FIRST_SCALE = 2.0**17
OVERFLOWS = 3
"""Step, from 1, whose loss is not a finite number."""
NF4 = QloraConfig(r=4, dropout=0.2)
DORA = QloraConfig(r=4, dropout=0.2, dora=True, rslora=True, targets=("q_proj", "down_proj"))
INT8 = QloraConfig(r=4, dropout=0.2, bits=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    path.write_bytes(tiny_jobs.data(tiny_jobs.KINDS["causal_lm lora"]))
    return path


def job(model: Path, **more: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "model": str(model), "optim": {"lr": 1e-2}, "max_steps": STEPS, "global_batch": 12,
        "data": {"path": "rows.csv", "prompt": "{word} ", "completion": "{meaning}", "eval_share": 0.2},
        "micro_batch": 3, "max_length": 32,
    }  # fmt: skip
    return TrainConfig.model_validate(fields | more)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"method": NF4, "optim": OptimConfig(name="sgd", lr=1e-1)}, id="nf4-sgd"),
        pytest.param({"method": DORA, "precision": "fp32"}, id="nf4-dora"),
        pytest.param({"method": INT8, "gradient_checkpointing": True}, id="int8"),
        pytest.param({"method": FullConfig(), "optim": OptimConfig(name="adamw_8bit", lr=1e-2)}, id="adamw_8bit"),
        pytest.param({"method": FullConfig(), "optim": OptimConfig(name="adafactor", lr=1e-2)}, id="adafactor"),
    ],
)
def test_a_run_that_is_killed_and_drained_equals_the_whole_one(
    more: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    whole = workers.finished(tmp_path / "whole", job(model, **more), data)
    found = workers.story(workers.resumed(tmp_path / "resumed", job(model, **more), data))
    assert found == workers.story(whole)
    assert found[0][0][1] > found[0][-1][1], "it learns"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """Return the complete snapshot of a QLoRA."""
    train = job(model, method=NF4, max_steps=14, output={"merge": True})
    return workers.finished(tmp_path_factory.mktemp("tuned") / "run", train, data)


def test_a_checkpoint_holds_the_adapters_and_refuses_another_base(
    tuned: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    assert all("lora_" in name for name in tensors(tuned))
    assert sum(t.numel() for t in tensors(tuned).values()) < 5_000
    base = json.loads((tuned / "state.json").read_text())["base"]
    assert base.startswith("sha256:")
    assert base.endswith(", 4 bits")
    other = shutil.copytree(model, tmp_path / "other")
    _change(other / "model.safetensors")
    worker = workers.Worker(tmp_path / "run", job(other, method=NF4), data, restore=tuned)
    ended = worker.start().end()
    assert ended.code == ExitCode.USER_ERROR
    assert ended.message.startswith(f"checkpoint: its adapters belong to other weights ({base}) than")


def test_adapter_checkpoint_of_another_rank_is_a_user_fault(
    tuned: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    """A job starts from another job's checkpoint of another rank. A retry on another machine would cost as much and
    fail again.
    """
    wider = NF4.model_copy(update={"r": 2 * NF4.r})
    ended = workers.Worker(tmp_path / "run", job(model, method=wider), data, restore=tuned).start().end()
    assert ended.code == ExitCode.USER_ERROR
    assert ended.message.startswith("checkpoint: verified, but it does not fit this job (")
    assert ended.message.endswith("; continue with the model and method that it was made with")


def test_the_identity_of_a_base_is_its_weights_and_how_they_are_quantised(model: Path) -> None:
    names = {identity(job(model, method=method)) for method in (LoraConfig(), LoraConfig(r=2), NF4, INT8)}
    assert len(names) == 3
    assert BaseIdentity(job(model, method=FullConfig())).name() == ""


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "text_encoder_2"])
def test_the_identity_of_a_diffusion_model_is_the_weights_of_its_parts(part: str, tmp_path: Path) -> None:
    folder = diffusion.sdxl(tmp_path / "sdxl")
    pictures = {"path": "rows.tar", "image": "image", "prompt": "{label}"}
    train = job(folder, method=LoraConfig(), task="text_to_image", data=pictures)
    before = identity(train)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"not read")
    assert identity(train) == before
    (weights,) = (folder / part).glob("*.safetensors")
    _change(weights)
    assert identity(train) != before


def test_a_model_of_the_hub_s_cache_is_known_by_the_names_of_its_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub" / "models--owner--name"
    files = [f"{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae", "onnx")]
    for number, name in enumerate(files):
        link, blob = cache / "snapshots" / "c0" / name, cache / "blobs" / (str(number) * 64)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"")
        link.parent.mkdir(parents=True)
        link.symlink_to(blob)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("c0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    pictures = {"path": "rows.tar", "image": "image", "prompt": "{label}"}
    train = job(Path("owner/name"), method=LoraConfig(), task="text_to_image", data=pictures)
    assert _files(train) == {name: str(number) * 64 for number, name in enumerate(files[:2])}


def _change(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def test_the_adapter_serves_the_unquantised_base(model: Path, tuned: Path) -> None:
    """Plain peft loads the adapter: training over the 4-bit base also improves the unquantised base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([[3, 7, 8, 11, 2]])

    def loss() -> float:
        with torch.no_grad():
            return float(base(input_ids=ids, labels=ids).loss)

    before = loss()
    served = PeftModel.from_pretrained(base, tuned / "adapter").eval()
    assert loss() < before
    with served.disable_adapter():
        assert loss() == before
    scores = json.loads((tuned / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]


def test_a_qlora_is_merged_into_the_weights_as_they_were_published(model: Path, tuned: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    published, merged = (load_file(folder / "model.safetensors") for folder in (model, tuned / "model"))
    assert {name: (t.dtype, t.shape) for name, t in merged.items()} == {
        name: (t.dtype, t.shape) for name, t in published.items()
    }
    changed = {name for name, t in merged.items() if not torch.equal(t, published[name])}
    assert changed == {name for name in published if "_proj" in name}
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tuned / "adapter").eval()
    whole = AutoModelForCausalLM.from_pretrained(tuned / "model")
    ids = torch.tensor([[3, 7, 8, 11, 2]])
    with torch.no_grad():
        assert torch.allclose(whole(input_ids=ids).logits, served(input_ids=ids).logits, atol=1e-4)


def test_two_processes_equal_one(model: Path, data: Path, tmp_path: Path) -> None:
    train = job(model, method=QloraConfig(r=4, dropout=0), precision="fp32", max_steps=3)
    one, two = (Crew(tmp_path / str(each), train, data, each=each).done().last for each in (1, 2))
    for a, b in zip(logged_steps(one), logged_steps(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_fsdp_over_a_quantised_base_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    crew = Crew(tmp_path / "crew", job(model, method=NF4), data, each=2, how=Parallelism(kind="fsdp"))
    ended = crew.start().ends()[0]
    assert ended.code == ExitCode.USER_ERROR
    assert ended.message.startswith("train.method.kind: FSDP cannot shard qlora's base; use lora")


@pytest.mark.parametrize("name", optimizers.WHOLE)
def test_fsdp_over_states_of_other_shapes_is_refused(name: Any) -> None:
    with pytest.raises(UserFault, match=f"train.optim.name: {name} cannot be divided by FSDP"):
        optimizers.build_optimizer({}, OptimConfig(name=name), divided=True)


def fp16(rank: int) -> None:
    """Train as on a GPU: with autocast to fp16 and a scaler that soon grows and soon overflows."""
    import accelerate
    import torch

    from trainer.models import loading as model

    make = accelerate.Accelerator

    def accelerator(**how: Any) -> Any:
        made = make(**how)
        made.native_amp, made.scaler = True, torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=2)
        return made

    model.precision_of = lambda config, device: "fp16"
    accelerate.Accelerator = accelerator


def fp16_killed(rank: int) -> None:
    fp16(rank)
    killed_within_a_step(rank)


def test_the_scaler_of_fp16_is_resumed(model: Path, data: Path, tmp_path: Path) -> None:
    train = job(model, method=LoraConfig(r=4, dropout=0.2), max_steps=10)
    whole = Crew(tmp_path / "whole", train, data, each=1, harm=fp16).done().last
    killed = Crew(tmp_path / "killed", train, data, each=1, harm=fp16_killed).start()
    killed.processes[0].join(HANGS_S)
    drained = Crew(tmp_path / "drained", train, data, each=1, harm=fp16, restore=killed.last).drained().last
    assert json.loads((drained / "state.json").read_text())["micro_batch_index"] > 0
    last = Crew(tmp_path / "last", train, data, each=1, harm=fp16, restore=drained).done().last
    assert logged_steps(last) == logged_steps(whole)
    assert (last / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    scalers = [_scaler(snapshot) for snapshot in (drained, last, whole)]
    assert scalers[1] == scalers[2] != scalers[0]
    assert scalers[0]["scale"] != FIRST_SCALE


def fp16_overflowing(rank: int) -> None:
    """Extend `fp16` by a loss that is not finite at one step."""
    import torch

    from trainer.training.step import StepRunner

    fp16(rank)
    forward, loops = StepRunner._forward, stepping_loops()

    def overflowing(runner: StepRunner, batch: list[Any]) -> torch.Tensor:
        return forward(runner, batch) * (math.inf if loops[-1]._progress.step + 1 == OVERFLOWS else 1.0)

    StepRunner._forward = overflowing  # type: ignore[method-assign]


def fp16_overflowing_drained(rank: int) -> None:
    """Drain within the step after the overflow."""
    from trainer.training.step import StepRunner

    fp16_overflowing(rank)
    forward, loops = StepRunner._forward, stepping_loops()

    def draining(runner: StepRunner, batch: list[Any]) -> Any:
        if loops[-1]._progress.step == OVERFLOWS:
            loops[-1]._run.drain.touch()
        return forward(runner, batch)

    StepRunner._forward = draining  # type: ignore[method-assign]


def test_training_continues_after_a_step_skipped_under_fp16(model: Path, data: Path, tmp_path: Path) -> None:
    train = job(model, method=LoraConfig(r=4, dropout=0.2), max_steps=OVERFLOWS + 3)
    whole = Crew(tmp_path / "whole", train, data, each=1, harm=fp16_overflowing).done().last
    drained = Crew(tmp_path / "drained", train, data, each=1, harm=fp16_overflowing_drained).start()
    assert [ended.code for ended in drained.ends()] == [ExitCode.DRAINED]
    assert json.loads((drained.last / "state.json").read_text())["micro_batch_index"] > 0
    last = Crew(tmp_path / "last", train, data, each=1, harm=fp16_overflowing, restore=drained.last).done().last
    assert logged_steps(last) == logged_steps(whole)
    assert [step for step, loss, *_ in logged_steps(whole) if loss is None] == [OVERFLOWS]
    assert (last / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert _scaler(last) == _scaler(whole)


def fp16_hopeless(rank: int) -> None:
    """Extend `fp16` by gradients that are never finite, with finite losses; the scale soon reaches its minimum."""
    import torch

    from trainer.training.step import StepRunner

    fp16(rank)
    clip = StepRunner._clip

    def hopeless(runner: StepRunner) -> float:
        for parameter in runner.trained.parameters.values():
            assert parameter.grad is not None
            parameter.grad.fill_(torch.nan)
        return clip(runner)

    StepRunner._clip = hopeless  # type: ignore[method-assign]


def test_gradients_that_no_scale_makes_finite_are_the_guards_business(model: Path, data: Path, tmp_path: Path) -> None:
    """The guard ends the job. Without the guard the job would complete without having learned anything."""
    halvings = int(math.log2(FIRST_SCALE)) + 1
    train = job(model, method=LoraConfig(r=4), max_steps=halvings + 9, guard={"skip": 2, "rollbacks": 0})
    crew = Crew(tmp_path / "run", train, data, each=1, harm=fp16_hopeless).start()
    (ended,) = crew.ends()
    assert ended.code == ExitCode.USER_ERROR
    assert f"step {halvings + 3}: the norm of the gradients is not a finite number, 3 in a row" in ended.message
    kinds = [json.loads(line)[0] for line in (crew.runs[0].root / "messages.jsonl").read_text().splitlines()]
    assert [kind for kind in kinds if kind in ("skipped", "diverged")] == ["skipped"] * 2 + ["diverged"]


def _scaler(snapshot: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((snapshot / "state.json").read_text())["scaler"]
    return found


def test_a_target_that_matches_nothing_is_named(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trainer.models.adapters import target_modules as chosen

    made = AutoModelForCausalLM.from_pretrained(model)
    assert chosen(made, LoraConfig(targets=("self_attn.q_proj", "up_proj"))) == ["self_attn.q_proj", "up_proj"]
    with pytest.raises(UserFault, match=r"train.method.targets: 'query' matches no linear module .* it has down_proj"):
        chosen(made, LoraConfig(targets=("q_proj", "query")))


def test_dora_over_eight_bits_is_refused() -> None:
    with pytest.raises(ValidationError, match="dora: peft cannot do it over a base of 8 bits; use bits: 4"):
        QloraConfig(bits=8, dora=True)


def test_a_list_of_one_word_is_the_word() -> None:
    assert LoraConfig.model_validate({"targets": ["attention"]}) == LoraConfig(targets="attention")
