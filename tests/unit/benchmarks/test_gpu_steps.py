"""The benchmark on a real GPU: what it does before and after the GPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_steps
from broker.sizing.estimate import estimate


def test_at_least_twenty_cases_are_predicted_before_any_is_measured() -> None:
    document = gpu_steps.frozen("H100-80GB")
    assert len(document["rows"]) >= 20
    assert document["digest"] == gpu_steps.digest(document["rows"])
    assert all(row["peak_allocated_bytes"] < row["device_used_bytes"] < 139 * 2**30 for row in document["rows"])


def test_predictions_that_were_touched_are_not_measured(tmp_path: Path) -> None:
    document = gpu_steps.frozen("H100-80GB")
    document["rows"][0]["peak_allocated_bytes"] += 1
    file = tmp_path / "p.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="was changed after it was frozen"):
        gpu_steps.measured(file, 60)


def test_every_case_is_a_row_also_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: str, way: dict[str, object]) -> dict[str, object]:
        if "gemma" in model:
            return {"error": "CUDA out of memory"}
        estimated = estimate(model, gpu="H100-80GB", **way)  # type: ignore[arg-type]
        more, faster = (1.5, 5) if "phi" in model else (1, 1)
        memory = {key: estimated[key] * more for key in gpu_steps.KEYS}
        return {**memory, gpu_steps.SPEED: estimated[gpu_steps.SPEED] * faster}

    monkeypatch.setattr(gpu_steps, "in_process", measured)
    file = tmp_path / "p.json"
    file.write_text(json.dumps(gpu_steps.frozen("H100-80GB")))
    gpu_steps.measured(file, 60)
    rows = json.loads((tmp_path / "p.measured.json").read_text())["rows"]
    summary = gpu_steps.summary(rows)
    assert (summary["n"], summary["failed"]) == (len(list(gpu_steps.cases())), 4)
    assert summary["peak_allocated_bytes"] == {"median_abs_pct": 0.0, "max_abs_pct": 33.33, "under_beyond_margin": 3}
    assert summary["tokens_per_s unchecked"]["in_interval"] == summary["tokens_per_s unchecked"]["n"] - 3
