"""Text to image: training of Stable Diffusion and SDXL, results for diffusers, and bitwise resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.trainer.support import diffusion, workers
from tests.trainer.support.crews import Crew, logged_steps
from trainer import preflight
from trainer.checkpoint.snapshot import StoredSnapshot
from trainer.contract.documents import Parallelism
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.errors import UserFault
from trainer.dataset.archives import packed
from trainer.tasks.image.diffusers_io import StableDiffusion
from trainer.tasks.image.frozen_encoders import min_snr_weights
from trainer.tasks.image.text_to_image import TextToImage

CPU = torch.device("cpu")
Made = dict[str, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("models")
    return {
        "sd": diffusion.stable_diffusion(folder / "sd"),
        "velocity": diffusion.stable_diffusion(folder / "velocity", "v_prediction"),
        "sdxl": diffusion.sdxl(folder / "sdxl"),
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.tar"
    path.write_bytes(packed(diffusion.SHAPES))
    return path


def config(folder: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "task": "text_to_image", "model": str(folder), "method": LoraConfig(r=4, dropout=0),
        "data": {"path": "shapes.tar", "image": "image", "prompt": "{label}", "eval_share": 0.2},
        "optim": OptimConfig(lr=1e-2), "max_steps": 6, "global_batch": 8, "micro_batch": 4,
        "diffusion": {"sample_steps": 2}, "samples": SamplesConfig(prompts=("circle",)),
    }  # fmt: skip
    return TrainConfig.model_validate(fields | changes)


def test_resume_bitwise_of_an_adapter_that_a_pipeline_takes(models: Made, data: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    train = config(models["sd"], precision="fp32")
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    (sample,) = json.loads((calm / "samples.json").read_text())
    assert sample == {"prompt": "circle", "base": "samples/00-base.png", "tuned": "samples/00-tuned.png"}
    assert (calm / sample["tuned"]).read_bytes() == (rough / sample["tuned"]).read_bytes()
    assert (calm / sample["tuned"]).read_bytes() != (calm / sample["base"]).read_bytes()
    adapters = [next((folder / "adapter").glob("*.safetensors")).read_bytes() for folder in (calm, rough)]
    assert adapters[0] == adapters[1]
    length = int.from_bytes(adapters[0][:8], "little")
    assert list(json.loads(adapters[0][8 : 8 + length])["__metadata__"]) == ["format", "lora_adapter_metadata"]

    pipeline = StableDiffusionPipeline.from_pretrained(models["sd"])
    pipeline.load_lora_weights(calm / "adapter")
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline("circle", generator=torch.Generator().manual_seed(17), num_inference_steps=2, height=16, width=16)
    made.images[0].save(tmp_path / "made.png")
    assert (tmp_path / "made.png").read_bytes() == (calm / sample["tuned"]).read_bytes()


@pytest.mark.parametrize("kind", ["velocity", "sdxl"])
def test_resume_bitwise_of_a_whole_model(kind: str, models: Made, data: Path, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    train = config(
        models[kind], method=FullConfig(), optim=OptimConfig(lr=1e-3), diffusion={"min_snr": 5, "sample_steps": 1}
    )
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    pipeline = DiffusionPipeline.from_pretrained(calm / "model")
    trained = StoredSnapshot(calm)
    for name, weight in pipeline.unet.named_parameters():
        assert torch.equal(weight, trained.read("model", name))


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_a_lora_is_merged_into_a_whole_pipeline(kind: str, models: Made, data: Path, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    merging = {"output": {"merge": True}, "max_steps": 2, "samples": SamplesConfig(), "precision": "fp32"}
    done = workers.finished(tmp_path / "run", config(models[kind], **merging), data)
    merged, adapted = (DiffusionPipeline.from_pretrained(folder) for folder in (done / "model", models[kind]))
    published = {name: weight.clone() for name, weight in adapted.unet.named_parameters()}
    adapted.load_lora_weights(done / "adapter")
    adapted.fuse_lora()
    adapted.unload_lora_weights()
    wanted = dict(adapted.unet.named_parameters())
    found = dict(merged.unet.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())
    assert any(not torch.equal(weight, published[name]) for name, weight in found.items())


def test_two_processes_learn_what_one_does_at_any_micro_batch(models: Made, data: Path, tmp_path: Path) -> None:
    train = config(models["sdxl"], max_steps=3, precision="fp32", samples=SamplesConfig())
    alone = Crew(tmp_path / "alone", train, data, each=1).done().last
    small = train.model_copy(
        update={"micro_batch": 2, "diffusion": train.diffusion.model_copy(update={"cache": False})}
    )
    both = Crew(tmp_path / "both", small, data, each=2).done().last
    for one, other in zip(logged_steps(both), logged_steps(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_divided_model_learns_and_saves_what_a_whole_one_does(models: Made, data: Path, tmp_path: Path) -> None:
    train = config(models["sd"], max_steps=2, precision="fp32", method=FullConfig(), micro_batch=2)
    alone = Crew(tmp_path / "alone", train, data, each=1).done().last
    divided = Crew(tmp_path / "divided", train, data, each=2, how=Parallelism(kind="fsdp")).done().last
    for one, other in zip(logged_steps(divided), logged_steps(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    saved = [load_file(next((folder / "model/unet").glob("*.safetensors"))) for folder in (alone, divided)]
    assert saved[0].keys() == saved[1].keys()
    for name, weight in saved[0].items():
        assert torch.allclose(weight, saved[1][name], atol=1e-4), name


def test_noise_depends_on_step_and_row_only(models: Made, data: Path) -> None:
    task = TextToImage(config(models["sd"]))
    examples, _ = task.examples(data, "tar")
    task.model.build("fp32")
    task.data.begin_step(3)
    whole = task.data.collate(examples[:4], CPU)
    torch.manual_seed(99)
    alone = task.data.collate(examples[2:3], CPU)
    assert all(torch.equal(alone[name][0], whole[name][2]) for name in whole)
    task.data.begin_step(4)
    assert not torch.equal(task.data.collate(examples[2:3], CPU)["noised"], alone["noised"])


@pytest.mark.parametrize("kind", ["sd", "velocity", "sdxl"])
def test_the_unet_gets_the_same_inputs_as_in_a_pipeline(kind: str, models: Made, data: Path) -> None:
    """Text and sizes equal the pipeline's. The latents follow when the scheduler's rule removes the noise."""
    from diffusers import DiffusionPipeline

    task = TextToImage(config(models[kind]))
    examples, _ = task.examples(data, "tar")
    task.model.build("fp32")
    batch = task.data.collate(examples[:2], CPU)
    pipeline = DiffusionPipeline.from_pretrained(models[kind])
    made = pipeline.encode_prompt("circle", device=CPU, num_images_per_prompt=1, do_classifier_free_guidance=False)
    assert torch.allclose(batch["text"][0], made[0][0], atol=1e-6)
    if kind == "sdxl":
        assert torch.allclose(batch["pooled"][0], made[2][0], atol=1e-6)
        assert batch["sizes"][0].tolist() == [64, 64, 0, 0, 16, 16]
    scheduler = task.data.diffusion.kind.scheduler
    for row, step in enumerate(batch["steps"]):
        kept = scheduler.alphas_cumprod[step]
        if kind == "velocity":
            latents = kept.sqrt() * batch["noised"][row] - (1 - kept).sqrt() * batch["wanted"][row]
        else:
            latents = (batch["noised"][row] - (1 - kept).sqrt() * batch["wanted"][row]) / kept.sqrt()
        mean = task.data._encoded[examples[row].number].mean * pipeline.vae.config.scaling_factor
        deviation = task.data._encoded[examples[row].number].deviation * pipeline.vae.config.scaling_factor
        assert ((latents - mean).abs() < 6 * deviation + 1e-3).all()


def test_min_snr_weighs_as_the_paper_has_it(models: Made) -> None:
    for kind in ("sd", "velocity"):
        of = StableDiffusion(config(models[kind])).kind.scheduler
        steps = torch.tensor([0, 500, 999])
        snr = of.alphas_cumprod[steps] / (1 - of.alphas_cumprod[steps])
        expected = [min(5, float(s)) / (float(s) + (1 if kind == "velocity" else 0)) for s in snr]
        assert min_snr_weights(of, steps, 5).tolist() == pytest.approx(expected)


def test_captions_are_measured_and_shown_before_a_purchase(
    models: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = config(models["sd"], data={"path": "shapes.tar", "image": "image", "prompt": "{label} drawn with a pen"})
    (tmp_path / "job.yaml").write_text(train.model_dump_json())
    capsys.readouterr()
    assert preflight.main([str(tmp_path / "job.yaml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["max_length"], document["truncated_share"]) == (36, 16, 1)
    assert document["lengths"]["max"] == len("triangledrawnwithapen") + 2
    assert document["rendered"][0]["learned"] == "circle/00.png: 64 x 64 pixels, as 16 x 16"


def test_a_preflight_finds_the_attention_of_a_unet(
    models: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for targets, code in (("attention", 0), (["to_q"], 0), (["q_proj"], 64)):
        (tmp_path / "job.yaml").write_text(
            config(models["sd"], method={"kind": "lora", "targets": targets}).model_dump_json()
        )
        assert preflight.main([str(tmp_path / "job.yaml")]) == code
    assert "'q_proj' matches no linear module of this model; it has" in capsys.readouterr().err


def test_a_base_of_four_bits_is_refused(models: Made) -> None:
    with pytest.raises(ValidationError, match="text_to_image trains over whole weights"):
        config(models["sd"], method={"kind": "qlora"})


def test_an_unsupported_diffusion_model_is_refused(models: Made, data: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(models["sd"], tmp_path / "sd")
    settings = json.loads((folder / "unet/config.json").read_text())
    (folder / "unet/config.json").write_text(json.dumps(settings | {"in_channels": 9}))
    with pytest.raises(UserFault, match="takes 9 channels, as for inpainting"):
        TextToImage(config(folder)).examples(data, "tar")
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(UserFault, match=r"model_index\.json says FluxPipeline"):
        TextToImage(config(folder)).examples(data, "tar")
