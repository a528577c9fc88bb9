"""A trace file is read as written, and a broken one is named with its line and the fix."""

import gzip
from pathlib import Path

import pytest

from broker.cli.core.trace_files import read_trace, read_traces
from broker.simulation.traces import Trace, TraceError, parse_trace

HEAD = "t_s,available,spot_usd,ondemand_usd"


def test_a_row_holds_until_the_next_one() -> None:
    trace = parse_trace("us-west-2a_v100_8", [HEAD, "0,1,0.5,2", "1200,0,0.6,2", "2400,0,0.6,2"])
    assert trace.available == (True, True, False, False)
    assert trace.spot_usd == (0.5, 0.5, 0.6, 0.6)
    assert (trace.zone, trace.gpu, trace.market) == ("us-west-2a", "v100", "v100_8")
    assert trace.window(1, 2).available == (True, False)


def test_a_name_of_another_form_is_the_zone() -> None:
    trace = Trace(name="pool", tick_s=600, available=(True,), spot_usd=(1.0,), on_demand_usd=2.0)
    assert (trace.zone, trace.gpu, trace.market, trace.nodes) == ("pool", "", "pool", 1)


def test_a_name_may_count_machines() -> None:
    trace = Trace(name="us-west1-b_h100_1x4", tick_s=600, available=(True,), spot_usd=(1.0,), on_demand_usd=2.0)
    assert (trace.zone, trace.gpu, trace.market, trace.nodes) == ("us-west1-b", "h100", "h100_1x4", 4)


def test_columns_may_come_in_any_order_after_a_byte_order_mark() -> None:
    lines = ["\ufeffondemand_usd, available,t_s,spot_usd,note", "2,1,0,0.5,x", "", "2,1,600,0.5,x"]
    assert parse_trace("a", lines).available == (True,)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "p.csv: no column t_s; write the header"),
        (["t_s,available,spot_usd", "0,1,1"], "p.csv: no column ondemand_usd; write the header"),
        ([HEAD, "0,1,1,2"], "p.csv: 1 rows; write two at least"),
        ([HEAD, "0,1,1,2", "600,1,x,2"], "p.csv:3: spot_usd 'x' is not a number"),
        ([HEAD, "0,1,1,2", "600,1,nan,2"], "p.csv:3: spot_usd 'nan' is not a number"),
        ([HEAD, "0,1,1,2", "600,-1,1,2"], "p.csv:3: available '-1' is not a number"),
        ([HEAD, "0,1,1,2", "600,1"], "p.csv:3: spot_usd '' is not a number"),
        ([HEAD, "0,1,1,2", "0,1,1,2"], "p.csv:3: t_s 0 is not after 0; sort"),
        ([HEAD, "0,1,1,0", "600,1,1,2"], "p.csv:2: ondemand_usd is 0; write"),
        ([HEAD, '0,1,1,"' + "2" * 2_000_000], "p.csv:2: field larger than field limit"),
    ],
)  # fmt: skip
def test_a_broken_trace_is_named_with_place_and_fix(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace("p", lines, place="p.csv")
    assert str(caught.value).startswith(message)
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    text = f"{HEAD}\n0,1,1,2\n600,1,1,2\n"
    (tmp_path / "b.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "README.md").write_text("no trace")
    assert [trace.name for trace in read_traces(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"\xff\xfe\x00", "no text in UTF-8"),
        ("a.csv.gz", b"no gzip", "no complete gzip file"),
        ("a.csv.gz", gzip.compress(b"t_s" * 900, mtime=0)[:20], "no complete gzip file"),
        ("a.csv.gz", gzip.compress(b"t_s" * 900, mtime=0)[:12] + b"x" * 9, "no complete gzip file"),
        ("a.csv", None, "No such file"),
    ],
)
def test_an_unreadable_file_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no file ends in \.csv"):
        read_traces(tmp_path)
    with pytest.raises(TraceError, match="No such file"):
        read_traces(tmp_path / "missing")
