"""A quote ranks its first lines at once and the others on access; the order is that of a full ranking."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from benchmarks.quote import PROVIDERS, SPEC, WORK, market
from broker.domain.instance import Caps
from broker.domain.offer import Quote
from broker.quote.engine import FIRST_LINES, quote

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def quoted(offers: int) -> Quote:
    return quote(
        SPEC, WORK, market(offers, NOW), now=NOW, local_files=False, scoped_store=True, spent=Decimal(0),
        cap_left=SPEC.cap_usd, excluded={}, caps={name: Caps(spot=True) for name in PROVIDERS},
    )  # fmt: skip


@pytest.mark.parametrize("offers", [0, 60, 1500])
def test_first_lines_are_those_of_a_full_ranking(offers: int) -> None:
    made = quoted(offers)
    near = [line.offer.id for line in made.lines[:FIRST_LINES]]
    single = [quoted(offers).lines[place].offer.id for place in range(min(3, offers))]
    summaries = [summary.offer for summary in made.considered()]
    assert len(made.lines) == offers == len(set(summaries))
    assert [line.offer.id for line in made.lines] == summaries
    assert near == summaries[:FIRST_LINES]
    assert single == summaries[: len(single)]
    assert [line.offer.id for line in made.lines[-2:]] == summaries[-2:]
    lines = [line for line in made.lines if line.drop is None]
    order = sorted(lines, key=lambda line: (line.usd_p50, line.offer.id))
    assert [line.offer.id for line in lines] == [line.offer.id for line in order]
    assert offers < 1500 or len(lines) > FIRST_LINES


def test_the_best_on_demand_line_is_the_first_kept_one() -> None:
    made = quoted(1500)
    best = made.best_on_demand()
    first = next(line for line in made.lines if line.drop is None and not line.offer.spot)
    assert best is not None
    assert best.offer.id == first.offer.id
