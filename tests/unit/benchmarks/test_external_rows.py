"""Published rows outside the repository are compared by their own command line."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import external_memory, external_throughput
from benchmarks.external_rows import EXTERNAL, Answered, ExternalRow, Unanswered, answer, p90, read
from broker.sizing.estimate import estimate

CALL = "gpubroker estimate --config Mistral.json --method full --micro-batch 2 --no-gradient-checkpointing --json"
BASE = {"source": "lab", "category": "", "ambiguous": "", "model": "m", "gpu": "L40S"}


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    config = EXTERNAL / "configs" / "Mistral-7B-v0.1.json"
    (tmp_path / "configs" / "Mistral.json").write_text(config.read_text())
    return tmp_path


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "external_rows.csv"
    with path.open("w", newline="") as file:
        file.write("# source: a laboratory\n")
        table = csv.DictWriter(file, [*BASE, "id", *rows[0]])
        table.writeheader()
        table.writerows({**BASE, "id": str(i), **row} for i, row in enumerate(rows))
    return str(path)


def last_line(module: Any, rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr("sys.argv", [module.__name__, "--rows", rows])
    module.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_memory_rows_of_another_folder_use_the_configs_beside_them(
    mistral: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = estimate(config=mistral / "configs" / "Mistral.json", method="full", micro_batch=2)
    kinds = {"allocated": known["peak_allocated_bytes"], "nvidia-smi": 2 * known["device_used_bytes"]}
    rows = [{"call": CALL, "measured_kind": kind, "measured_bytes": size} for kind, size in kinds.items()]
    rows.append({"call": CALL + " --unknown", "measured_kind": "allocated", "measured_bytes": 1})
    rows.append({"call": "gpubroker quote", "measured_kind": "allocated", "measured_bytes": 1})
    document = last_line(external_memory, written(mistral, rows), monkeypatch, capsys)
    assert (document["n"], document["median_abs_pct"], document["p90_abs_pct"]) == (2, 25.0, 50.0)
    assert (document["within_margin"], document["refused_by_source"]) == (0.5, {"lab": 2})
    assert document["by_source"]["lab"]["n"] == 2
    assert document["by_kind"]["allocated"]["within_margin"] == 1.0
    assert document["without_recipes"]["n"] == 2


def test_rows_get_the_recipe_of_their_library(mistral: Path) -> None:
    """A fine-tune by HF Trainer has bf16 weights under autocast: 2 bytes a weight, not 4."""
    values = {**BASE, "id": "1", "call": CALL, "measured_kind": "allocated", "measured_bytes": "1"}
    rows = [ExternalRow(folder=mistral, values={**values, "source": source}) for source in ("fms 4.44.2", "lab")]
    with_recipe, without = (external_memory.compare(row) for row in rows)
    assert isinstance(with_recipe, Answered)
    assert isinstance(without, Answered)
    assert with_recipe.estimated < 0.7 * without.estimated
    assert external_memory.compare(rows[0], by_recipe=False).estimated == without.estimated  # type: ignore[union-attr]
    named = ExternalRow(folder=mistral, values={**values, "source": "fms", "call": f"{CALL} --recipe trl"})
    assert external_memory.recipe_of(named) is None


def test_speed_rows_report_coverage_and_width(
    mistral: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = mistral / "configs" / "Mistral.json"
    known = estimate(config=config, method="full", micro_batch=2, gpu="H100-SXM")
    speeds = [known["tokens_per_s"], 3 * known["tokens_per_s"]]
    rows = [{"call": f"{CALL} --gpu H100-SXM", "measured_tps": speed} for speed in speeds]
    rows.append({"call": CALL, "measured_tps": 1})
    document = last_line(external_throughput, written(mistral, rows), monkeypatch, capsys)
    low, high = known["tokens_per_s_interval"]
    assert (document["n"], document["coverage_90"], document["refused"]) == (2, 0.5, 1)
    assert document["median_width"] == pytest.approx(math.sqrt(high / low), abs=0.001)
    assert document["by_source"]["lab"]["median_abs_pct"] == pytest.approx(100 / 3, abs=0.01)


@pytest.mark.parametrize("module", [external_memory, external_throughput])
def test_a_file_without_answers_ends_with_a_document(
    module: Any, mistral: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"call": "gpubroker estimate --config none.json", "measured_kind": "vram", "measured_bytes": 1}]
    document = last_line(module, written(mistral, rows), monkeypatch, capsys)
    assert (document["n"], document["median_abs_pct"], document["refused"]) == (0, None, 1)


def test_every_config_of_the_repositorys_rows_exists() -> None:
    rows = [row for kind in ("memory", "throughput") for row in read(EXTERNAL / f"external_{kind}.csv")]
    refused = [document.reason for row in rows[::9] if isinstance(document := answer(row), Unanswered)]
    assert all(reason.startswith("--gpu") for reason in refused)
    assert all("\n" not in reason for reason in refused)


def test_p90_is_an_error_that_occurred() -> None:
    assert p90([5.0, 1.0, 2.0]) == 5.0
    assert p90(float(n) for n in range(1, 11)) == 9.0
