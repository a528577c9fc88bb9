"""The benchmark on a real GPU: what it does before and after the GPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_memory
from broker.sizing import estimate


def test_at_least_twenty_cases_are_predicted_before_any_is_measured() -> None:
    document = gpu_memory.frozen()
    assert len(document["rows"]) >= 20
    assert document["digest"] == gpu_memory.digest(document["rows"])
    assert all(row["peak_allocated_bytes"] < row["device_used_bytes"] < 139 * 2**30 for row in document["rows"])


def test_predictions_that_were_touched_are_not_measured(tmp_path: Path) -> None:
    document = gpu_memory.frozen()
    document["rows"][0]["peak_allocated_bytes"] += 1
    file = tmp_path / "p.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="was changed after it was frozen"):
        gpu_memory.measured(file)


def test_every_case_is_a_row_also_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: str, way: dict[str, object]) -> dict[str, object]:
        if "gemma" in model:
            return {"error": "CUDA out of memory"}
        found = estimate(model, **way)  # type: ignore[arg-type]
        return {key: int(found[key] * 1.5) if "phi" in model else found[key] for key in gpu_memory.KEYS}

    monkeypatch.setattr(gpu_memory, "in_process", measured)
    file = tmp_path / "p.json"
    file.write_text(json.dumps(gpu_memory.frozen()))
    gpu_memory.measured(file)
    rows = json.loads((tmp_path / "p.measured.json").read_text())["rows"]
    told = gpu_memory.summary(rows)
    assert (told["n"], told["failed"]) == (len(list(gpu_memory.cases())), 3)
    assert told["peak_allocated_bytes"] == {"median_abs_pct": 0.0, "max_abs_pct": 33.33, "under_beyond_margin": 3}
