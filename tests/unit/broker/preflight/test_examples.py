"""Every example of a task passes the checks that come before a purchase, with its own data."""

from pathlib import Path

import pytest
import yaml

from broker.domain.spec import JobSpec
from broker.preflight.dataset import check, summarise
from trainer.dataset.archives import packed
from trainer.dataset.readers import format_of

FOLDER = Path(__file__).parents[4] / "examples" / "tasks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_an_example_fits_its_data(path: Path) -> None:
    written = JobSpec.model_validate(yaml.safe_load(path.read_text()))
    # The API converts nothing.
    spec = JobSpec.model_validate_json(written.model_dump_json(), strict=True)
    assert spec.train is not None
    data = path.parent / spec.train.data.path
    read, kind = (packed(data), "tar") if data.is_dir() else (data.read_bytes(), format_of(data.name, None))
    report = check(spec.train, summarise(read, kind))
    assert report.train_rows >= spec.train.global_batch
    assert report.truncated_share == 0
