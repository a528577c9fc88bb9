"""A training checkpoint is read only where its plan and its files agree; nothing but safetensors and JSON is opened."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint import protocol as checkpoint
from trainer.checkpoint.protocol import Origin
from trainer.contract import checkpoint_format as checkpoint_plan
from trainer.contract.checkpoint_format import BadFormat, Window, overlap
from trainer.objectstore.objects import Objects, connect

ORIGIN = Origin(job="j", attempt="a", kind="train")


def write(folder: Path, step: int = 1) -> Path:
    """Write two processes' halves of a tensor with five rows."""
    import torch

    from trainer.checkpoint.snapshot import Local, SnapshotWriter, joined, writer_plan

    folder.mkdir(parents=True)
    whole = torch.arange(15.0).reshape(5, 3)
    halves = []
    for number, (start, end) in enumerate(((0, 3), (3, 5))):
        own = Local(tensor=whole[start:end].clone(), start=(start, 0), whole=(5, 3))
        halves.append(({"model": {"w": own}, "optimizer": {}, "gradients": {}}, SnapshotWriter(number=number, of=2)))
    from safetensors.torch import save_file

    for held, writer in halves:
        save_file({"w": held["model"]["w"].tensor}, folder / checkpoint_plan.file_name("model", writer.number, 2))
    plan = joined([writer_plan(held, writer) for held, writer in halves])
    (folder / "plan.json").write_text(plan.model_dump_json())
    (folder / "state.json").write_text(checkpoint_plan.Progress(step=step).model_dump_json())
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_any_window_of_two_processes_shards_can_be_read(tmp_path: Path) -> None:
    import torch

    from trainer.checkpoint.snapshot import StoredSnapshot

    checkpoint_plan.verify(write(tmp_path / "c"))
    stored, whole = StoredSnapshot(tmp_path / "c"), torch.arange(15.0).reshape(5, 3)
    assert torch.equal(stored.read("model", "w"), whole)
    assert torch.equal(stored.read("model", "w", ((2, 1), (3, 2))), whole[2:5, 1:3])
    assert stored.read("model", "w", ((5, 0), (0, 3))).numel() == 0
    with pytest.raises(ValueError, match="has the shape"):
        stored.read("model", "w", ((4, 0), (2, 3)))


def first(folder: Path) -> Path:
    return folder / "model-00000-of-00002.safetensors"


def forge(folder: Path, change: Callable[[Any, Any], object]) -> None:
    """Change a checkpoint: `change` receives the plan and its tensor."""
    plan = json.loads((folder / "plan.json").read_text())
    change(plan, plan["tensors"]["model"]["w"])
    (folder / "plan.json").write_text(json.dumps(plan))


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle beside": (
        lambda f: (f / "optimizer.pt").write_bytes(pickle.dumps({})),
        "holds 'optimizer.pt', which is neither safetensors nor JSON",
    ),
    "torch's metadata": (lambda f: (f / ".metadata").write_bytes(pickle.dumps({})), "holds '.metadata'"),
    "a pickle within": (lambda f: first(f).write_bytes(pickle.dumps({"w": 1})), "is not a safetensors file"),
    "cut": (lambda f: first(f).write_bytes(first(f).read_bytes()[:-4]), "is not a safetensors file"),
    "no plan": (lambda f: (f / "plan.json").unlink(), "has no plan.json"),
    "plan of another kind": (lambda f: (f / "plan.json").write_text("[]"), "plan.json cannot be read"),
    "a plan too deep": (lambda f: (f / "plan.json").write_text("[" * 100_000), "plan.json cannot be read"),
    "a header too deep": (
        lambda f: first(f).write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000),
        "is not a safetensors file",
    ),
    "later format": (lambda f: forge(f, lambda p, w: p.update(version=2)), "its format is 2, this trainer reads 1"),
    "no state": (lambda f: (f / "state.json").write_text("{"), "state.json is absent or cannot be read"),
    "a group less": (lambda f: forge(f, lambda p, w: p["tensors"].pop("optimizer")), "lacks optimizer"),
    "a part less": (lambda f: forge(f, lambda p, w: w["pieces"].pop()), "overlap or leave a gap"),
    "a part twice": (lambda f: forge(f, lambda p, w: w["pieces"].append(w["pieces"][0])), "overlap or leave a gap"),
    "another type": (lambda f: forge(f, lambda p, w: w.update(dtype="F16")), "does not hold the part"),
    "elsewhere": (lambda f: forge(f, lambda p, w: w["pieces"][0].update(file="../x")), "leaves the folder"),
}


@pytest.mark.parametrize("harm", HARMS)
async def test_a_checkpoint_with_a_wrong_format_is_skipped(harm: str, tmp_path: Path) -> None:
    """The manifest's hashes are right, so that only the format is wrong."""
    objects = Objects(connect((tmp_path / "store").as_uri(), {}), "inst")
    keys = []
    for step in (1, 2):
        folder = write(tmp_path / str(step), step)
        if step == 2:
            HARMS[harm][0](folder)
            with pytest.raises(BadFormat, match=HARMS[harm][1]):
                checkpoint_plan.verify(folder)
        keys.append((await checkpoint.commit(objects, ORIGIN, folder, step=step, complete=False, taken_s=0.0))[0])
    told: list[str] = []
    found = await checkpoint.restore(objects, keys[::-1], tmp_path / "back", kind="train", log=told.append)
    assert found is not None
    assert found[1].step == 1
    assert len(told) == 1
    assert HARMS[harm][1] in told[0]


spans = st.tuples(st.integers(0, 6), st.integers(0, 4))


@given(st.lists(st.tuples(spans, spans), min_size=1, max_size=3))
def test_overlap_is_what_both_windows_hold(sides: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    one: Window = tuple(a for (a, _), _ in sides), tuple(m for (_, m), _ in sides)
    other: Window = tuple(b for _, (b, _) in sides), tuple(n for _, (_, n) in sides)
    ranges = [set(range(a, a + m)) & set(range(b, b + n)) for (a, m), (b, n) in sides]
    expected = None if not all(ranges) else (tuple(min(r) for r in ranges), tuple(len(r) for r in ranges))
    assert overlap(one, other) == expected == overlap(other, one)
