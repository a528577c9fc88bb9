"""Record of the offers that were considered for an attempt: it comes back from storage unchanged."""

from dataclasses import replace
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from broker.domain.offer import DropReason, Offer
from broker.quote.decision_record import packed, unpacked
from tests.support.machines import SCRIPT, offer, quoted


def test_the_record_has_every_offer_with_its_reason() -> None:
    market = [offer(id="a"), offer(id="dear", usd_per_hour=Decimal("20.5")), offer(id="b", accelerator="tpu")]
    made = quoted(market, resources={"max_usd_per_hour": "10"})
    found = unpacked(packed(made))
    assert [(one.offer, one.drop) for one in found] == [
        ("a", None), ("dear", DropReason.HOURLY_LIMIT), ("b", DropReason.UNKNOWN_HARDWARE),
    ]  # fmt: skip
    assert [one.reason for one in found] == [line.reason for line in made.lines]
    assert found[0].usd_p50 == made.lines[0].usd_p50
    assert found[1].usd_per_hour == Decimal("20.5")


OFFERS = st.builds(
    lambda gpus, price, spot, rate, region: offer(
        gpus=gpus, usd_per_hour=price, spot=spot, preemptions_per_hour=rate, region=region, accelerator="l40s"
    ),
    st.sampled_from([1, 2, 8]),
    st.decimals("0", "30", places=4),
    st.booleans(),
    st.none() | st.floats(0, 9),
    st.sampled_from(["eu", "us"]),
)


@given(st.lists(OFFERS, max_size=6))
def test_the_record_says_of_every_offer_what_the_quote_does(market: list[Offer]) -> None:
    made = quoted([replace(one, id=f"o{n}") for n, one in enumerate(market)], resources={"max_usd_per_hour": "10"})
    assert [tuple(one) for one in unpacked(packed(made))] == [
        (line.offer.id, line.offer.usd_per_hour, line.drop, line.reason, line.usd_p50) for line in made.lines
    ]


def test_the_record_of_a_script_has_no_expected_cost() -> None:
    assert unpacked(packed(quoted([offer()], work=SCRIPT)))[0].usd_p50 is None


@given(st.integers(0, 40))
def test_a_record_is_small(count: int) -> None:
    document = packed(quoted([offer(id=f"cloud/region/{n}") for n in range(count)]))
    assert len(unpacked(document)) == count
    assert len(document) < 200 + 20 * count
