"""Image classification of real digits from archives and columns: training, saved model and bitwise resume."""

import base64
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from pydantic import ValidationError

from tests.trainer.support import digits, workers
from tests.trainer.support import tiny_models as heads
from tests.trainer.support.crews import Crew, logged_steps
from tests.trainer.support.pack import tar
from trainer.contract.documents import ExitCode
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, TrainConfig
from trainer.core.errors import DataFault, UserFault
from trainer.dataset.prompts import DataError
from trainer.tasks.common import image_loading as pictures
from trainer.tasks.image.image_classification import ImageClassification, LabelledImage

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.vit(tmp_path_factory.mktemp("models") / "vit")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "digits.tar"
    path.write_bytes(digits.archive(300))
    return path


def config(folder: Path, path: str = "digits.tar", **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "task": "image_classification", "model": str(folder), "method": LoraConfig(r=8),
        "data": {"path": path, "image": "image", "label": "label", "eval_share": 0.2}, "optim": OptimConfig(lr=1e-2),
        "max_steps": 40, "global_batch": 24, "micro_batch": 12,
    }  # fmt: skip
    return TrainConfig.model_validate(fields | changes)


@pytest.mark.parametrize(("method", "rate"), [(LoraConfig(r=8), 2e-2), (FullConfig(), 1e-2)], ids=["lora", "full"])
def test_resume_bitwise_of_digits(method: Any, rate: float, model: Path, data: Path, tmp_path: Path) -> None:
    train = config(model, method=method, optim=OptimConfig(lr=rate))
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores == json.loads((rough / "eval.json").read_text())
    assert scores["metrics_before"]["accuracy"] < 0.3
    assert scores["metrics_after"]["accuracy"] > 0.5
    assert scores["heldout_loss_after"] < 0.6 * scores["heldout_loss_before"]


def without_room(rank: int) -> None:
    pictures.CACHE_BYTES = 0


def killed_without_room(rank: int) -> None:
    without_room(rank)
    workers.killed_within_a_step(rank)


def test_resume_bitwise_of_pictures_that_are_decoded_ahead(model: Path, data: Path, tmp_path: Path) -> None:
    """No memory is left to keep decoded pictures, so each step's pictures are decoded while the step before it
    trains.
    """
    train = config(model, max_steps=12)
    kept = workers.finished(tmp_path / "kept", train, data)
    killed = workers.Worker(tmp_path / "killed", train, data).start(killed_without_room)
    killed.process.join(workers.HANGS_S)
    last = workers.Worker(tmp_path / "last", train, data, restore=killed.last).start(without_room)
    assert last.end().code == ExitCode.COMPLETED
    assert workers.story(last.last) == workers.story(kept)


def test_the_next_step_s_pictures_are_made_ready_by_another_thread(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "CACHE_BYTES", 0)
    task = ImageClassification(config(model))
    shots = [task.examples(data, "tar")[0][i] for i in range(6)]
    plain = task.data.collate(shots, CPU)
    by: list[threading.Thread] = []
    made = task.data._resized

    def noting(row: dict[str, Any], number: int) -> Any:
        by.append(threading.current_thread())
        return made(row, number)

    task.data._prefetcher = pictures.ImagePrefetcher(noting)
    monkeypatch.setattr(task.data, "_resized", noting)
    task.data.prepare_ahead(shots[:4])
    assert torch.equal(task.data.collate(shots, CPU)["pixel_values"], plain["pixel_values"])
    assert by.count(threading.main_thread()) == 2
    assert len(by) == 6
    task.data.prepare_ahead([])
    task.data.collate(shots[:4], CPU)
    assert len(by) == 6, "of the step that trains now they are there still"
    broken = {**shots[0].row, "image": tar({})}
    task.data.prepare_ahead([LabelledImage(number=9, row=broken, label=0)])
    with pytest.raises(DataError, match="row 9"):
        task.data.collate([LabelledImage(number=9, row=broken, label=0)], CPU)


def test_several_threads_make_pictures_ready_at_once() -> None:
    together = threading.Barrier(3, timeout=300)

    def make(row: dict[str, Any], number: int) -> Any:
        together.wait()
        return np.full((1, 1, 1), number, np.uint8)

    ahead = pictures.ImagePrefetcher(make, threads=3)
    ahead.begin({number: {} for number in range(6)})
    assert [int(ahead.get(number)[0, 0, 0]) for number in range(6)] == [*range(6)]  # type: ignore[index]


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 1, 1), (16, 1, 8), (16, 4, 3), (1, 8, 1)])
def test_decoding_leaves_each_process_a_core(
    cores: int, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(cores)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert pictures.spare_threads() == threads


def test_a_whole_model_is_saved_with_its_processor_and_labels(model: Path, data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    train = config(model, method=FullConfig(), max_steps=2, precision="fp32")
    done = workers.finished(tmp_path / "run", train, data) / "model"
    saved = AutoModelForImageClassification.from_pretrained(done).eval()
    assert saved.config.id2label == {n: str(n) for n in range(10)}
    assert json.loads((done / "preprocessor_config.json").read_text())["size"] == {"height": 8, "width": 8}


def test_a_lora_trains_its_adapters_and_the_new_head_alone(model: Path, data: Path) -> None:
    task = ImageClassification(config(model))
    task.examples(data, "tar")
    trained = {name for name, p in task.model.build("fp32").named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        f"base_model.model.classifier.modules_to_save.default.{kind}" for kind in ("weight", "bias")
    }
    assert not any("classifier" in name and "lora_" in name for name in trained)


def test_pixels_and_base64_and_files_are_the_same_pictures(model: Path, tmp_path: Path) -> None:
    drawn = list(digits.drawn(30))
    rows = {
        "pixels.jsonl": [{"image": pixels.tolist(), "label": label} for label, pixels in drawn],
        "base64.jsonl": [{"image": base64.b64encode(digits.png(p)).decode(), "label": label} for label, p in drawn],
    }
    files = {f"{n:03d}.png": digits.png(pixels) for n, (_, pixels) in enumerate(drawn)}
    table = "\n".join(["file_name,label", *(f"{n:03d}.png,{label}" for n, (label, _) in enumerate(drawn))])
    (tmp_path / "described.tar").write_bytes(tar({**files, "metadata.csv": table.encode()}))
    for name, lines in rows.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    batches = []
    for name in (*rows, "described.tar"):
        task = ImageClassification(config(model, name))
        examples, _ = task.examples(tmp_path / name, name.rsplit(".", 1)[1])
        batches.append(task.data.collate(examples, CPU))
    for batch in batches[1:]:
        assert torch.equal(batch["pixel_values"], batches[0]["pixel_values"])
        assert torch.equal(batch["labels"], batches[0]["labels"])
    first = (np.stack([drawn[0][1]] * 3) / 255 - 0.5) / 0.5
    assert np.allclose(batches[0]["pixel_values"][0], first, atol=1e-6)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


GREY = Image.fromarray(np.full((2, 4), 100, np.uint8))
RED = Image.new("RGB", (4, 2), (200, 0, 0))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (encoded(RED.convert("P", palette=Image.Palette.ADAPTIVE)), (200, 0, 0)),
        (encoded(RED.convert("P", palette=Image.Palette.ADAPTIVE), transparency=0), (200, 0, 0)),
        (encoded(Image.new("RGBA", (4, 2), (200, 0, 0, 90))), (200, 0, 0)),
        (encoded(Image.merge("LA", (GREY, GREY))), (100,) * 3),
        (encoded(GREY.point(lambda value: 255, "1")), (255,) * 3),
        (encoded(Image.fromarray(np.full((2, 4), 100 * 257, np.uint16))), (100,) * 3),
        (encoded(Image.fromarray(np.full((2, 4), 100 * 257, ">u2")), "TIFF"), (100,) * 3),
        (encoded(GREY, "TIFF", compression="tiff_lzw"), (100,) * 3),
        (encoded(RED, "GIF", save_all=True, append_images=[RED]), (200, 0, 0)),
        (encoded(RED, "WEBP", lossless=True), (200, 0, 0)),
    ],
    ids=["palette", "transparent palette", "alpha", "grey and alpha", "1 bit", "16 bits", "16 bits of the other order",
         "TIFF", "animation", "WebP"],
)  # fmt: skip
def test_every_kind_of_pixels_is_read_in_rgb(file: bytes, expected: tuple[int, ...]) -> None:
    picture = pictures.decode(file)
    assert (picture.mode, picture.size) == ("RGB", (4, 2))
    assert picture.getpixel((1, 1)) == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_by_their_exif(orientation: int) -> None:
    drawn = Image.fromarray(np.arange(8, dtype=np.uint8).reshape(2, 4) * 30)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = encoded(drawn, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert np.array_equal(np.asarray(pictures.decode(file)), np.asarray(upright.convert("RGB")))


ODD_TAG = (
    b"Exif\0\0MM\0*\0\0\0\x08\0\x03\x01A\0\x02\0\0\0\x05\0\0\x002\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    b"\x82\x9a\0\x0c\0\0\0\x01\0\0\x008\0\0\0\0xxxx\0\0?\xf8\0\0\0\0\0\0"
)
"""EXIF of orientation 6 with a tag that Pillow reads and cannot write again, so that `exif_transpose` fails."""


@pytest.mark.parametrize(
    ("kind", "exif", "size"),
    [("PNG", b"no TIFF", (4, 2)), ("WEBP", b"II*\0", (4, 2)), ("JPEG", ODD_TAG, (2, 4))],
)
def test_a_damaged_exif_does_not_spoil_its_picture(kind: str, exif: bytes, size: tuple[int, int]) -> None:
    picture = pictures.decode(encoded(RED, kind, exif=exif))
    assert (picture.mode, picture.size) == ("RGB", size)


def test_pictures_beyond_the_cache_are_decoded_again(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ImageClassification(config(model))
    monkeypatch.setattr(pictures, "CACHE_BYTES", 500)
    again = ImageClassification(config(model))
    batches = [t.data.collate(t.examples(data, "tar")[0][:5], CPU)["pixel_values"] for t in (kept, again)]
    assert torch.equal(*batches)


def test_every_broken_picture_is_named_and_counted(model: Path, tmp_path: Path) -> None:
    files = digits.folders(20)
    first, second, third = list(files)[:3]
    files |= {first: b"no picture", second: files[second][:40], third: files[third][:-30]}
    (tmp_path / "d.tar").write_bytes(tar(files))
    task = ImageClassification(config(model, "d.tar"))
    with pytest.raises(DataFault, match=r"3 of 20 rows are bad, data\.bad_share is 0"):
        task.examples(tmp_path / "d.tar", "tar")
    order = sorted(files)
    assert [fault.split(":")[0] for fault in task.data.reader.faults] == [
        f"d.tar row {order.index(name) + 1} ({name})" for name in sorted((first, second, third))
    ]
    left = config(model, data={"path": "d.tar", "image": "image", "label": "label", "bad_share": 0.2})
    examples, _ = ImageClassification(left).examples(tmp_path / "d.tar", "tar")
    assert len(examples) == 17


def test_a_small_file_that_would_be_a_huge_picture_is_not_decoded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 63)
    (tmp_path / "d.tar").write_bytes(digits.archive(20))
    with pytest.raises(DataFault, match=r"8 x 8 pixels are more than 63"):
        ImageClassification(config(model, "d.tar")).examples(tmp_path / "d.tar", "tar")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "preprocessor_config.json",
            {"size": {"height": 16, "width": 16}},
            r"makes pictures of 16 x 16, the model takes 8 x 8; set its size",
        ),
        ("preprocessor_config.json", {"image_mean": [0.5], "image_std": [0.5]}, r"mend its image_mean and image_std"),
        ("config.json", {"num_channels": 1}, r"takes pictures of 1 channels, .*; take a model of 3 channels"),
    ],
    ids=["size", "mean", "channels"],
)
def test_pictures_that_do_not_fit_the_model_are_refused_before_the_rows(
    file: str, change: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    """The preflight reads the rows, so it refuses them before a machine is bought."""
    folder = heads.vit(tmp_path / "vit")
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(settings | change))
    with pytest.raises(UserFault, match=message):
        ImageClassification(config(folder)).examples(data, "tar")


def test_sample_prompts_are_refused_by_tasks_that_generate_no_text(model: Path) -> None:
    with pytest.raises(ValidationError, match="image_classification writes nothing"):
        config(model, samples={"prompts": ["a digit"]})


def test_two_processes_learn_what_one_does(model: Path, data: Path, tmp_path: Path) -> None:
    train = config(model, max_steps=3, precision="fp32", method=FullConfig())
    alone = Crew(tmp_path / "alone", train, data, each=1).done().last
    both = Crew(tmp_path / "both", train, data, each=2).done().last
    for one, other in zip(logged_steps(both), logged_steps(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    scores = [json.loads((folder / "eval.json").read_text()) for folder in (alone, both)]
    assert scores[0]["heldout_loss_after"] == pytest.approx(scores[1]["heldout_loss_after"], rel=1e-5)
