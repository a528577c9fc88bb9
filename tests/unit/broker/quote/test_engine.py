"""Quotes: the kept offers, their order and cost, and the reasons of dropped offers."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.offer import GIB, DropReason, HostFacts, Offer, OfferVerdict, QuoteLine
from broker.estimator.preemption_rate import FAILURES_PER_GPU_HOUR
from broker.quote.engine import quote
from broker.quote.summary import LABELS, summary
from tests.support.machines import CAPS, LONG, NOW, SCRIPT, WORK, offer, quoted, spec
from trainer.contract.save_interval import interval_s

UPLOAD_S = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)) * 12 / 50e6
"""Seconds to upload a checkpoint: adapters and two moments in float32, at 50 MB/s."""


def only(line_of: Any) -> QuoteLine:
    (line,) = line_of.lines
    assert isinstance(line, QuoteLine)
    return line


@pytest.mark.parametrize(
    ("changes", "arguments", "drop", "words"),
    [
        ({}, {"resources": {"providers": ["runpod"]}}, DropReason.PROVIDER, "provider cloud; asked for runpod"),
        ({}, {"resources": {"accelerators": ["l40s"]}}, DropReason.ACCELERATOR, "accelerator h100-sxm; asked for l40s"),
        ({}, {"resources": {"gpus": 2}}, DropReason.GPUS, "1 GPUs; asked for 2"),
        ({}, {"resources": {"nodes": 2}}, DropReason.NODES, "cloud does not support multi-node; asked for 2 nodes"),
        (
            {},
            {"resources": {"nodes": 2, "max_usd_per_hour": "4"}, "caps": {"cloud": Caps(spot=True, multi_node=True)}},
            DropReason.HOURLY_LIMIT,
            "$5.0000/h is above max_usd_per_hour 4",
        ),
        ({}, {"resources": {"spot": "only"}}, DropReason.SPOT, "on-demand; spot is 'only' in the spec"),
        ({"spot": True}, {"resources": {"spot": "never"}}, DropReason.SPOT, "spot; spot is 'never' in the spec"),
        ({}, {"local_files": True}, DropReason.UNREACHABLE, "cannot reach the blob store"),
        ({"trust": "community"}, {"scoped_store": False}, DropReason.UNSCOPED, "let the daemon scope them"),
        (
            {},
            {"scoped_store": False, "caps": {"cloud": Caps(spot=True, trust="community")}},
            DropReason.UNSCOPED,
            "a community host would get the blob store's own credentials",
        ),
        (
            {},
            {"caps": {"cloud": Caps(spot=True, has_trainer=False)}},
            DropReason.NO_TRAINER,
            "pip install 'gpubroker[trainer]'",
        ),
        ({}, {"resources": {"regions": ["us", "ap"]}}, DropReason.REGION, "region eu; asked for ap, us"),
        ({"accelerator": "tpu"}, {}, DropReason.UNKNOWN_HARDWARE, "no figures for tpu"),
        ({"gpu_memory_bytes": GIB}, {}, DropReason.MEMORY, "has 1.0"),
        ({"usd_per_hour": Decimal(0)}, {}, DropReason.PRICE, "is impossible"),
        ({"usd_per_hour": Decimal(-1), "provider": "mine"}, {}, DropReason.PRICE, "is impossible"),
        ({"spot": True, "on_demand_usd_per_hour": Decimal(1)}, {}, DropReason.PRICE, "is above on-demand"),
        (
            {},
            {"resources": {"max_usd_per_hour": "2"}},
            DropReason.HOURLY_LIMIT,
            "$2.5000/h is above max_usd_per_hour 2",
        ),
        ({"spot": True, "preemptions_per_hour": 20.0}, {}, DropReason.PREEMPTED_TOO_OFTEN, "preempted every 3 min"),
        ({}, {"cap_left": Decimal("0.5")}, DropReason.CAP, "to finish; $0.5000 of the cap is left"),
        ({"available": False}, {}, DropReason.UNAVAILABLE, "the cloud has none now"),
        ({}, {"excluded": {"cloud/x": "sold out until 12:05"}}, DropReason.EXCLUDED, "sold out until 12:05"),
        (
            {"facts": HostFacts(host="7")},
            {"excluded": {"host:Cloud/7": "hung twice"}},
            DropReason.EXCLUDED,
            "hung twice",
        ),
        ({}, {"excluded": {"account:cloud/": "cannot list"}}, DropReason.EXCLUDED, "cannot list"),
        ({}, {"excluded": {"account:cloud/Cloud/": "no credit"}}, DropReason.EXCLUDED, "no credit"),
    ],
)
def test_dropped_offers_state_their_reason(
    changes: dict[str, Any], arguments: dict[str, Any], drop: DropReason, words: str
) -> None:
    made = quoted([offer(**changes)], **arguments)
    line = only(made)
    assert (line.verdict, line.drop) == (OfferVerdict.DROPPED, drop)
    assert words in line.reason
    assert "\n" not in line.reason
    assert made.best is None
    assert made.drops == {drop: 1}
    assert summary(made).startswith(f"0 of 1 offers kept; dropped: 1 {LABELS[drop]}")


def test_only_community_hosts_elsewhere_need_a_store_that_scopes() -> None:
    market = [
        offer(id="anybody", trust="community"),
        offer(id="data-centre", trust="secure"),
        offer(id="here", trust="community", reaches_local_files=True),
        offer(id="unsaid"),
    ]
    unscoped, scoped = quoted(market, scoped_store=False), quoted(market)
    assert [line.offer.id for line in unscoped.lines[: unscoped.kept_count]] == ["here", "data-centre", "unsaid"]
    assert scoped.kept_count == len(market)


def test_every_drop_reason_has_a_label() -> None:
    assert set(LABELS) == set(DropReason)


def test_kept_when_everything_asked_for_is_there() -> None:
    resources = {
        "providers": ["cloud"], "accelerators": ["h100"], "regions": ["eu"], "gpus": 1, "spot": "never",
        "max_usd_per_hour": "2.50",
    }  # fmt: skip
    made = quoted([offer(available=True)], resources=resources)
    line = only(made)
    assert line.verdict is OfferVerdict.KEPT
    assert line.drop is None
    assert line.memory is not None
    assert summary(made) == "1 of 1 offers kept"
    assert made.expires_at - made.made_at == timedelta(minutes=5)


def test_dollars_are_price_times_setup_work_and_teardown() -> None:
    line = only(quoted([offer()]))
    assert line.hours_p50 is not None
    assert line.hours_p90 is not None
    assert line.usd_p50 is not None
    assert line.usd_p90 is not None
    seconds = line.hours_p50 * 3600 + 5
    assert float(line.usd_p50) == pytest.approx(2.5 * seconds / 3600, abs=2.5 / 3600)
    assert line.hours_p50 > 120 / 3600 + WORK.steps * (line.step_s or 0) / 3600
    assert line.hours_p90 > line.hours_p50
    assert line.usd_p90 > line.usd_p50


def test_a_billing_quantum_is_paid_whole() -> None:
    line = only(quoted([offer(billing_quantum_s=36_000)]))
    assert line.usd_p50 == line.usd_p90 == Decimal(25)


def test_preemptions_cost_lost_work_and_another_setup() -> None:
    work = replace(WORK, steps=100)
    calm, spot = (only(quoted([offer(spot=True, preemptions_per_hour=r)], work=work)) for r in (0.0, 1.0))
    assert calm.hours_p50 is not None
    assert spot.hours_p50 is not None
    # Lost in each: half an interval, a checkpoint under way, and a set-up. Set-up: 120 s, 15 s of start, the download
    # of 16 GB at 200 MB/s.
    setup = (120 + 15 + 2 * 8_030_261_248 / 200e6) / 3600
    assert calm.hours is not None
    last = calm.hours_p50 - setup - calm.hours.training - calm.hours.evaluation  # stalls, and the last upload
    assert UPLOAD_S / 3600 < last < 1.1 * UPLOAD_S / 3600
    stall = UPLOAD_S * 50e6 / 2e9
    every = interval_s(UPLOAD_S + stall, 1 + FAILURES_PER_GPU_HOUR, 300)
    assert UPLOAD_S < every < 300 - UPLOAD_S - stall, "saves come sooner where machines are often taken away"
    work = (calm.hours.training + calm.hours.evaluation) * (1 + stall / every)
    lost = (every / 2 + UPLOAD_S + stall) / 3600 + setup
    assert spot.hours_p50 == pytest.approx(setup + work / (1 - lost) + UPLOAD_S / 3600)


def test_a_full_fine_tune_loses_what_its_uploads_take() -> None:
    """96 GB at 50 MB/s: one checkpoint follows the other, and a preemption loses one and a half of them."""
    full = replace(WORK, method="full", micro_batch=1)
    markets = [[offer(accelerator="b200", gpu_memory_bytes=180 * GIB, spot=spot)] for spot in (False, True)]
    calm, spot = (only(quoted(market, work=full, cap_left=Decimal(10**6))) for market in markets)
    assert calm.hours is not None
    assert spot.hours is not None
    upload = 12 * 8_030_261_248 / 50e6
    lost = 1.5 * upload * (1 + 50e6 / 2e9) + 3600 * (spot.hours.boot + spot.hours.load)
    rate = 1 / 3.7 / 3600
    work = (spot.hours.training + spot.hours.evaluation) * (1 + 1 / 41)
    assert spot.hours.preemptions == pytest.approx(work * (1 / (1 - rate * lost) - 1))


def test_an_unknown_preemption_rate_is_assumed_and_stated() -> None:
    unknown, calm = only(quoted([offer(spot=True)])), only(quoted([offer(spot=True, preemptions_per_hour=0.0)]))
    assert "one in 3.7 h assumed" in unknown.reason
    assert "assumed" not in calm.reason
    assert (unknown.usd_p50 or 0) > (calm.usd_p50 or 0)


def test_a_machine_that_cannot_stop_itself_says_so() -> None:
    assert "only its cloud's API ends the billing" in only(quoted([offer()])).reason
    assert "billing" not in only(quoted([offer(provider="mine")])).reason


def test_an_unlisted_provider_gets_default_capabilities() -> None:
    assert only(quoted([offer(provider="new")])).verdict is OfferVerdict.KEPT


def test_ones_own_machine_may_be_free_and_sees_local_files() -> None:
    made = quoted([offer(provider="mine", usd_per_hour=Decimal(0))], local_files=True)
    assert only(made).usd_p50 == 0
    assert made.proposed_cap_usd == Decimal("0.01")
    assert only(quoted([offer(reaches_local_files=True)], local_files=True)).verdict is OfferVerdict.KEPT


def test_the_proposed_cap_is_spent_and_five_quarters_of_p90() -> None:
    made = quoted([offer()], spent=Decimal(3))
    best = made.best
    assert best is not None
    assert best.usd_p90 is not None
    exact = 3 + best.usd_p90 * Decimal("1.25")
    assert made.proposed_cap_usd is not None
    assert exact <= made.proposed_cap_usd < exact + Decimal("0.01")


def test_the_cheapest_finish_is_known_where_the_cap_does_not_suffice() -> None:
    kept = quoted([offer()])
    assert kept.best is not None
    assert quoted([offer()], cap_left=Decimal("0.01")).cheapest_usd == kept.best.usd_p50
    assert quoted([offer(accelerator="tpu")]).cheapest_usd is None


def test_a_script_is_ranked_by_price_and_its_time_is_not_known() -> None:
    offers = [offer(id="dear", usd_per_hour=Decimal(3)), offer(id="cheap", usd_per_hour=Decimal(1), accelerator="tpu")]
    made = quoted(offers, work=SCRIPT)
    assert [line.offer.id for line in made.lines] == ["cheap", "dear"]
    assert made.lines[0].usd_p50 is None
    assert made.proposed_cap_usd is None
    assert quoted(offers, work=SCRIPT, cap_left=Decimal("0.0001")).kept_count == 0


def test_a_faster_gpu_can_make_the_same_work_cheaper() -> None:
    """The job can be cheaper on a machine with a higher hourly price."""
    fast = offer(id="h100", usd_per_hour=Decimal("2.5"))
    slow = offer(id="a6000", accelerator="a6000", gpu_memory_bytes=48 * GIB, usd_per_hour=Decimal("1.5"))
    assert [line.offer.id for line in quoted([slow, fast]).lines] == ["h100", "a6000"]


def test_lines_are_a_sequence() -> None:
    made = quoted([offer(id="b"), offer(id="a"), offer(id="c", available=False)])
    assert len(made.lines) == 3
    assert made.lines[-1].offer.id == "c"
    assert [line.offer.id for line in made.lines[:2]] == ["a", "b"]
    assert made.lines[0] == made.lines[0]
    with pytest.raises(IndexError):
        made.lines[3]


offers = st.builds(
    offer,
    id=st.uuids().map(str),
    provider=st.sampled_from(["cloud", "mine", "new"]),
    accelerator=st.sampled_from(["h100-sxm", "a100-80gb-sxm", "l4", "cpu", "tpu"]),
    gpus=st.sampled_from([1, 2, 8]),
    gpu_memory_bytes=st.sampled_from([0, 16 * GIB, 40 * GIB, 80 * GIB]),
    region=st.sampled_from(["eu", "us"]),
    spot=st.booleans(),
    usd_per_hour=st.decimals(0, 50, places=4),
    on_demand_usd_per_hour=st.none() | st.decimals(0, 50, places=2),
    available=st.sampled_from([None, True, False]),
    preemptions_per_hour=st.none() | st.floats(0, 30),
    billing_quantum_s=st.sampled_from([1, 60, 3600]),
    billing_minimum_s=st.sampled_from([0, 7200]),
    vcpus=st.sampled_from([1, 26]),
).map(lambda one: replace(one, gpus=0) if one.accelerator == "cpu" else one)
markets = st.lists(offers, max_size=12)
resource_asks = st.fixed_dictionaries(
    {},
    optional={
        "regions": st.just(["eu"]),
        "spot": st.sampled_from(["allowed", "never", "only"]),
        "max_usd_per_hour": st.just("20"),
        "gpus": st.sampled_from(["auto", 1, 8]),
    },
)
caps_left = st.decimals("0.01", 200, places=6)


@given(markets, resource_asks, caps_left)
def test_every_offer_once_kept_first_by_cost_and_within_the_cap(
    market: list[Offer], resources: dict[str, Any], left: Decimal
) -> None:
    made = quoted(market, resources=resources, cap_left=left)
    lines = tuple(made.lines)
    assert sorted(line.offer.id for line in lines) == sorted(o.id for o in market)
    verdicts = [line.verdict for line in lines]
    assert verdicts == sorted(verdicts, key=lambda v: v is OfferVerdict.DROPPED)
    kept = [line for line in lines if line.verdict is OfferVerdict.KEPT]
    assert len(kept) == made.kept_count
    assert sum(made.drops.values()) + made.kept_count == len(lines)
    costs = [(line.usd_p50, line.offer.id) for line in kept]
    assert costs == sorted(costs)
    for line in kept:
        assert line.usd_p50 is not None
        assert line.usd_p90 is not None
        assert line.usd_p50 <= left
        assert line.usd_p90 >= line.usd_p50
        assert made.cheapest_usd is not None
        assert made.cheapest_usd <= line.usd_p50


@given(offers, st.integers(0, 200 * GIB))
def test_more_memory_never_turns_kept_into_dropped(one: Offer, more: int) -> None:
    if quoted([one]).kept_count:
        has = one.gpu_memory_bytes or 80 * GIB
        assert quoted([replace(one, gpu_memory_bytes=has + more)]).kept_count


@given(offers, st.decimals("0.0001", 10, places=4))
def test_a_dearer_offer_never_ranks_above_an_equal_cheaper_one(one: Offer, more: Decimal) -> None:
    dear = replace(one, id="a-dear", usd_per_hour=one.usd_per_hour + more)
    made = quoted([dear, replace(one, id="b-cheap")], cap_left=Decimal(10**6))
    if made.kept_count == 2:
        cheap, dearer = made.lines
        assert (cheap.usd_p50 or 0) <= (dearer.usd_p50 or 0)
        assert cheap.offer.id == "b-cheap" or cheap.usd_p50 == dearer.usd_p50


@given(markets, caps_left)
def test_the_order_of_the_market_does_not_matter(market: list[Offer], left: Decimal) -> None:
    forth, back = quoted(market, cap_left=left), quoted(market[::-1], cap_left=left)
    assert forth.lines[: forth.kept_count] == back.lines[: back.kept_count]


def test_boot_time_of_the_provider_is_paid() -> None:
    def at(boot_s: float) -> Decimal:
        made = quote(
            spec(), WORK, [offer()], now=NOW, local_files=False, scoped_store=True, spent=Decimal(0),
            cap_left=Decimal(100), excluded={}, caps={**CAPS, "cloud": Caps(spot=True, boot_s=boot_s)},
        )  # fmt: skip
        assert made.best is not None
        assert made.best.usd_p50 is not None
        return made.best.usd_p50

    assert float(at(3720) - at(120)) == pytest.approx(2.5, abs=0.01)


def test_a_job_whose_machine_ran_out_of_its_own_memory_gets_one_with_more() -> None:
    (line,) = quoted([offer(ram_bytes=64 * GIB)], work=replace(WORK, oom_host_bytes=64 * GIB)).lines
    assert (line.drop, line.reason) == (DropReason.HOST, "64 GiB of RAM; the job ran out of 64 before")
    assert quoted([offer(ram_bytes=65 * GIB)], work=replace(WORK, oom_host_bytes=64 * GIB)).kept_count == 1


def test_a_line_says_what_its_speed_rests_on() -> None:
    (line,) = quoted([offer()], work=LONG).lines
    assert line.runs == 0
    assert line.evidence == "fitted on runs on the h100-sxm; 90 % interval, which held 90 % of runs of unseen groups"


HOST_CAPS = {**CAPS, "mine": replace(CAPS["mine"], named_only=True)}
HOST = offer(id="mine/x", provider="mine", cloud="mine", usd_per_hour=Decimal(0))


@pytest.mark.parametrize(
    ("resources", "caps", "best"),
    [
        ({}, HOST_CAPS, "cloud/x"),
        ({"providers": ["mine"]}, HOST_CAPS, "mine/x"),
        ({"providers": ["mine", "cloud"]}, HOST_CAPS, "mine/x"),
        ({}, CAPS, "mine/x"),
    ],
    ids=["not named", "named", "named with a cloud", "priced, or without a cloud"],
)
def test_a_free_host_is_bought_only_where_it_is_meant(
    resources: dict[str, Any], caps: Mapping[str, Caps], best: str
) -> None:
    made = quoted([offer(), HOST], resources=resources, caps=caps)
    assert made.best is not None
    assert made.best.offer.id == best


def test_a_free_host_that_is_not_named_says_how_to_use_it() -> None:
    line = quoted([HOST], caps=HOST_CAPS).lines[0]
    assert line.drop is DropReason.PROVIDER
    assert "resources.providers: [mine]" in line.reason
    assert "providers.mine.usd_per_hour" in line.reason


def test_a_busy_machine_names_its_job() -> None:
    busy = quoted([replace(HOST, available=False, busy_with="b" * 13)]).lines[0]
    assert (busy.drop, busy.reason) == (DropReason.UNAVAILABLE, "busy with job bbbbbbbbbbbbb")
    unknown = quoted([replace(HOST, available=False)]).lines[0]
    assert unknown.reason == "the cloud has none now"
