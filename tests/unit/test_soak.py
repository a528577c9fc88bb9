"""Totals outlive the run that made them."""

import json
from pathlib import Path

import pytest

from tests import soak

SAYS = 'import sys; print(\'on the way\'); print(\'{{"kills": {}, "name": "x"}}\'); sys.exit({})'


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two parts: one holds, the other breaks in its second round."""
    for name, code in (("soak_holds", SAYS.format(3, 0)), ("soak_breaks", SAYS.format(2, "int(sys.argv[1]) == 1"))):
        (tmp_path / f"{name}.py").write_text(code)
    made = {
        "holds": soak.Part(command=lambda n: ("soak_holds", str(n))),
        "breaks": soak.Part(command=lambda n: ("soak_breaks", str(n))),
    }
    monkeypatch.setattr(soak, "PARTS", made)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "totals.json"


def test_a_later_run_goes_on_with_other_rounds_and_adds(parts: Path) -> None:
    rounds = [soak.round_of("breaks", n, parts.parent) for n in range(2)]
    assert rounds == [({"kills": 2, "name": "x"}, True), ({"kills": 2, "name": "x"}, False)]
    totals = {"holds": {"rounds": 4, "failed_rounds": 0, "kills": 12}}
    soak.kept(parts, totals)
    assert json.loads(parts.read_text()) == totals
    assert soak.added(totals["holds"], {"kills": 3, "name": "x"}) == {"rounds": 4, "failed_rounds": 0, "kills": 15}
    assert soak.added({"leak_age_max": 9.5}, {"leak_age_max": 3.0}) == {"leak_age_max": 9.5}


def test_what_broke_is_kept_in_words(parts: Path) -> None:
    soak.round_of("breaks", 1, parts.parent)
    assert "on the way" in (parts.parent / "breaks-1.log").read_text()
    soak.round_of("holds", 1, parts.parent)
    assert not (parts.parent / "holds-1.log").exists()


def test_no_time_leaves_the_totals_alone(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts.write_text('{"holds": {"rounds": 1}}')
    assert soak.main(["--minutes", "0", "--only", "holds", "--totals", str(parts)]) == 0
    assert json.loads(capsys.readouterr().out) == {"holds": {"rounds": 1}}
