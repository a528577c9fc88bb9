"""`gpubroker offers --history` and `offers export`: recorded prices as table, CSV, JSON and spot traces."""

import csv
import io
from asyncio import to_thread
from datetime import UTC, datetime

import pytest

from broker.cli.core.exit_codes import Exit
from broker.cli.core.trace_files import read_trace
from broker.domain.market.offer_history import BUCKET_S, BucketFigures, MarketGroup, OfferSample, bucket_of
from tests.cli.conftest import Shell

SPOT = MarketGroup("vast", "vast", "SE 1", "h100", 8, True)
ON_DEMAND = SPOT._replace(spot=False)
OTHER = SPOT._replace(region="NO")
BUCKETS = 60
OUTAGE = range(20, 40)
"""Buckets in which the cloud gave no answer: longer than an hour."""
SOLD_OUT = range(45, 50)


async def record(shell: Shell) -> int:
    """Record five hours of a market with an outage and a shortage. Return the first bucket."""
    first = bucket_of(datetime.now(UTC)) - BUCKETS
    dear = BucketFigures(400_000, 400_000, None)
    for number in (n for n in range(BUCKETS) if n not in OUTAGE):
        figures = {ON_DEMAND: dear}
        if number not in SOLD_OUT:
            figures |= {SPOT: BucketFigures(100_000 + number, 120_000, 100), OTHER: BucketFigures(90_000, 90_000, 100)}
        await shell.api.service.store.record_offers(
            [OfferSample(provider="vast", bucket=first + number, figures=figures)]
        )
    await shell.api.service.store.record_refusal(OTHER, first + 59)
    return first


async def test_history_is_a_table_and_a_plot_a_document_and_csv(shell: Shell) -> None:
    await record(shell)
    ran = await to_thread(shell.run, "offers", "--history", "1d", "--gpu", "H100")
    assert ran.code == 0, ran.err
    assert "8× h100" in ran.out
    assert "$9.00" in ran.out
    assert "lowest $/h of a machine by days before now" in ran.out
    document = (await to_thread(shell.run, "offers", "--history", "1d", "-g", "h100", "--json")).document
    assert [(item["region"], item["spot"]) for item in document["items"]] == [
        ("NO", True),
        ("SE 1", True),
        ("SE 1", False),
    ]
    words = ("offers", "--history", "1d", "-g", "h100", "--csv", "--market", "on-demand", "--gpus", "8")
    rows = list(csv.DictReader(io.StringIO((await to_thread(shell.run, *words)).out)))
    assert {(row["region"], row["market"], row["lowest_usd"]) for row in rows} == {("SE 1", "on-demand", "40.0000")}
    ran = await to_thread(shell.run, "offers", "--history", "1d", "--gpu", "A100")
    assert (ran.code, "no price of these offers was recorded" in ran.out) == (0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--history", "7d"), "--gpu: name the GPUs of the history"),
        (("--history", "91d", "--gpu", "h100"), "--history 91d: write 1 to 90 days"),
        (("--history", "7d", "--gpu", "h1000"), "h1000"),
        (("--history", "7d", "--gpu", "h100", "--market", "free"), "market"),
        (("--cloud", "vast"), "--cloud needs --history"),
        (("--history", "7d", "--gpu", "h100", "--provider", "vast"), "use --cloud"),
    ],
)
async def test_wrong_history_is_one_line(shell: Shell, words: tuple[str, ...], message: str) -> None:
    ran = await to_thread(shell.run, "offers", *words)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (Exit.BAD_INPUT, "", 1)
    assert message in ran.err


async def test_export_writes_traces_that_benchmarks_read(shell: Shell) -> None:
    """An outage ends a trace, because each row holds until the next one. A shortage or a refused create does not."""
    await record(shell)
    folder = shell.folder / "traces"
    ran = await to_thread(shell.run, "offers", "export", str(folder), "--gpu", "h100", "--days", "8", "--json")
    assert ran.code == 0, ran.err
    names = ["vast-no-h100-8x-2.csv", "vast-no-h100-8x.csv", "vast-se-1-h100-8x-2.csv", "vast-se-1-h100-8x.csv"]
    assert sorted(ran.document["files"]) == names
    whole = read_trace(folder / "vast-se-1-h100-8x.csv", tick_s=BUCKET_S)
    assert (len(whole.available), set(whole.available), whole.on_demand_usd) == (20, {True}, 40.0)
    assert whole.spot_usd[0] == 10.0
    short = read_trace(folder / "vast-se-1-h100-8x-2.csv", tick_s=BUCKET_S)
    shortage = [number - OUTAGE.stop in range(5, 10) for number in range(OUTAGE.stop, BUCKETS)]
    assert [not available for available in short.available] == shortage
    refused = read_trace(folder / "vast-no-h100-8x-2.csv", tick_s=BUCKET_S)
    assert [n for n, available in enumerate(refused.available) if not available] == [5, 6, 7, 8, 9, 19]


async def test_export_without_history_or_into_a_file_says_so(shell: Shell) -> None:
    ran = await to_thread(shell.run, "offers", "export", str(shell.folder / "t"), "--gpu", "h100")
    assert (ran.code, ran.out) == (0, "no spot offer was recorded with an on-demand price\n")
    await record(shell)
    (shell.folder / "file").write_text("")
    ran = await to_thread(shell.run, "offers", "export", str(shell.folder / "file"), "--gpu", "h100")
    assert (ran.code, ran.out) == (Exit.BAD_INPUT, "")
    assert "name a folder that can be written" in ran.err
