"""A region without offers is named, with the region that the user probably meant."""

import pytest

from broker.domain.formatting import unsold_regions
from broker.quote.summary import summary
from tests.support.machines import offer, quoted


@pytest.mark.parametrize(
    ("asked", "sold", "said"),
    [
        (("us-est-1",), {"us-east-1", "ap-south-2"}, ("us-est-1 (did you mean us-east-1?)",)),
        (("de",), {"DE", "DK"}, ("de (did you mean DE?)",)),
        (("UK",), {"DE", "GB"}, ("UK (there are DE, GB)",)),
        (("zz",), set("abcdefghijklmnop"), ("zz (there are a, b, c, d, e, f, g, h, i, j, k, l, …)",)),
        (("DE",), {"DE"}, ()),
        (("DE",), set(), ()),
        ((), {"DE"}, ()),
    ],
)
def test_regions_without_offers_are_named(asked: tuple[str, ...], sold: set[str], said: tuple[str, ...]) -> None:
    assert unsold_regions(asked, sold) == said


def test_quote_and_wait_reason_name_unsold_regions() -> None:
    made = quoted([offer(region="us-east-1")], resources={"regions": ["us-est-1", "us-east-1"]})
    assert (made.kept_count, made.unsold_regions) == (1, ("us-est-1 (did you mean us-east-1?)",))
    made = quoted([offer(region="us-east-1")], resources={"regions": ["us-est-1"]})
    assert summary(made).endswith("1 are in other regions; no offer is in us-est-1 (did you mean us-east-1?)")
    assert quoted([offer()]).unsold_regions == ()
