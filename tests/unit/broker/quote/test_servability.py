"""A job that no configured provider can ever serve is refused with the requirement and a change that helps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.domain.instance import Caps
from broker.domain.offer import GIB, DropReason, Offer, ProviderStatus
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload
from broker.estimator.planning.corrections import Corrections, model_key
from broker.quote.servability import PASSING, RULES, ServableMarket, may_be_served, unserved
from tests.support.machines import LLAMA_3_8B, NOW, SCRIPT, WORK, offer, quoted, spec

RENTED = Caps(spot=True)
ON_DEMAND = Caps(spot=False, multi_node=True, accelerators=frozenset({"h100-sxm", "a10g"}))
MINE = Caps(spot=False, trust="own", reaches_local_files=True, lists_all=True)
HERE = offer(
    id="mine/gpu", provider="mine", accelerator="rtx4090", gpu_memory_bytes=24 * GIB, region="here", trust="own"
)
HUGE = replace(LLAMA_3_8B, layers=400, parameters=10**12)


def market(caps: Mapping[str, Caps], offers: Sequence[Offer] = (), **facts: Any) -> ServableMarket:
    given = {"local_files": False, "scoped_store": True, **facts}
    unanswered = given.pop("unanswered", ())
    status = [ProviderStatus(name=name, seen_at=None if name in unanswered else NOW) for name in caps]
    return ServableMarket(caps=caps, status=status, offers=offers, now=NOW, **given)


def refusal(job: JobSpec, where: ServableMarket, work: Workload = WORK) -> tuple[str, str] | None:
    problem = unserved(job, work, where)
    return None if problem is None else (problem.field, problem.message)


def script(**changes: Any) -> JobSpec:
    given = {"name": "job", "cap_usd": "1", "script": {"code": "c.tar", "command": ["x"], **changes.pop("script", {})}}
    return JobSpec.model_validate(given | changes)


def test_every_reason_lasts_or_passes() -> None:
    assert set(RULES) | PASSING == set(DropReason)
    assert PASSING.isdisjoint(RULES)


def test_an_offer_that_is_only_sold_out_or_dear_may_be_served() -> None:
    assert may_be_served(quoted([offer()]))
    assert may_be_served(quoted([offer(available=False)]))
    assert may_be_served(quoted([offer()], resources={"max_usd_per_hour": "0.1"}))
    assert not may_be_served(quoted([offer()], resources={"accelerators": ["l4"]}))


def test_an_image_is_refused_where_no_provider_runs_it() -> None:
    job = script(script={"image": "pytorch/pytorch:2.9.0"})
    refused = refusal(job, market({"mine": MINE}, [HERE], local_files=True), SCRIPT)
    assert refused is not None
    assert refused[0] == "script.image"
    assert "mine runs no image of a job; use runpod or vast, or leave out script.image" in refused[1]
    assert refusal(job, market({"mine": MINE, "pods": replace(RENTED, images=True)}, [HERE]), SCRIPT) is None


def test_a_disk_that_is_full_for_now_is_no_reason() -> None:
    """A job that waits for the running one to end needs the disk only then."""
    full = replace(HERE, disk_bytes=GIB, available=False)
    assert refusal(spec(), market({"mine": MINE}, [full], local_files=True)) is None


@pytest.mark.parametrize(
    ("learned", "is_served"),
    [(Corrections(shortfalls={model_key(WORK): 3.0}), False), (Corrections(), True)],
    ids=["ran out of memory", "nothing observed"],
)
def test_memory_is_judged_as_own_runs_have_shown(learned: Corrections, is_served: bool) -> None:
    """A job that quotes drop everywhere for its memory must not wait for ever."""
    where = market({"mine": MINE}, [HERE], local_files=True, learned=learned)
    refused = refusal(spec(), where)
    assert (refused is None) is is_served
    assert is_served or "needs 60.8 GiB per GPU, has 24.0" in str(refused)


@pytest.mark.parametrize(
    ("resources", "caps", "field", "words"),
    [
        (
            {"accelerators": ["l40s"]},
            {"aws": ON_DEMAND},
            "accelerators",
            "ever sells l40s; the nearest that would do is 1× a10g",
        ),
        (
            {"accelerators": ["l4"], "gpus": 3},
            {"mine": MINE},
            "accelerators",
            "ever sells l4; the nearest that would do is 1× rtx4090 at mine",
        ),
        ({"gpus": 64}, {"a": RENTED}, "gpus", "sells a machine with 64 GPUs; 16× a10g at a would do, or gpus: auto"),
        ({"gpus": 32, "accelerators": ["h100"]}, {"a": RENTED}, "gpus", "with 32 h100; 16× h100"),
        ({"nodes": 2}, {"a": RENTED}, "nodes", "connects 2 machines; one node of 1× a10g at a would do"),
        ({"spot": "only"}, {"aws": ON_DEMAND}, "spot", "with spot: only; with spot: allowed, 1× a10g at aws would do"),
        ({"trust": "own"}, {"a": RENTED}, "trust", "hosts of trust own; with trust: secure, 1× a10g at a would do"),
        (
            {"regions": ["us"]},
            {"mine": MINE},
            "regions",
            "sells in us (there are here); in region here, 1× rtx4090 at mine would do",
        ),
        (
            {"providers": ["mine"], "nodes": 2},
            {"mine": MINE, "aws": ON_DEMAND},
            "nodes",
            "one node of 1× rtx4090 at mine",
        ),
        (
            {"providers": ["mine"], "gpus": 8},
            {"mine": MINE, "aws": ON_DEMAND},
            "gpus",
            "with 8 GPUs; 1× rtx4090 at mine",
        ),
        ({"nodes": 2, "spot": "only"}, {"aws": ON_DEMAND, "a": RENTED}, "spot", "with spot: allowed, 1× a10g at aws"),
        (
            {"nodes": 2, "spot": "only", "trust": "own"},
            {"a": RENTED},
            "",
            "connects 2 machines; change resources, or configure",
        ),
    ],
)
def test_the_requirement_and_what_would_do_are_named(
    resources: dict[str, Any], caps: dict[str, Caps], field: str, words: str
) -> None:
    named = refusal(spec(resources=resources), market(caps, [HERE] if "mine" in caps else ()))
    assert named is not None
    assert named[0] == (f"resources.{field}" if field else "resources")
    assert words in named[1]


@pytest.mark.parametrize(
    "resources", [{}, {"accelerators": ["h100"]}, {"regions": ["x"]}, {"gpus": 3}, {"trust": "secure"}]
)
def test_a_cloud_may_sell_tomorrow_what_it_does_not_list_today(resources: dict[str, Any]) -> None:
    assert refusal(spec(resources=resources), market({"a": RENTED})) is None


def test_unknown_markets_never_refuse() -> None:
    never = spec(resources={"accelerators": ["b200"]})
    assert refusal(never, market({"mine": MINE}, [HERE])) is not None
    assert refusal(never, market({"mine": MINE}, [HERE], unanswered=["mine"])) is None
    assert refusal(never, market({"mine": MINE}, [])) is None, "a list of everything that is empty is not an answer"
    assert refusal(never, market({"mine": MINE, "a": RENTED}, [HERE], unanswered=["a"])) is None
    only_mine = spec(resources={"accelerators": ["b200"], "providers": ["mine"]})
    assert refusal(only_mine, market({"mine": MINE, "a": RENTED}, [HERE], unanswered=["a"])) is not None
    assert refusal(never, market({})) is None


def test_gpu_that_only_a_listing_names_counts_for_its_cloud() -> None:
    odd = offer(id="a/odd", provider="a", accelerator="gtx1080", gpu_memory_bytes=8 * GIB, gpus=1)
    job = script(resources={"accelerators": ["gtx1080"], "gpus": 2})
    bare = [odd, replace(odd, id="b/odd", provider="gone"), replace(odd, id="a/cpu", accelerator="cpu", gpus=0)]
    assert refusal(job, market({"a": RENTED}, bare), SCRIPT) is None
    assert refusal(job, market({"a": RENTED}), SCRIPT) is not None


def test_a_job_that_fits_nowhere_names_a_smaller_demand() -> None:
    caps = {"mine": MINE}
    full = refusal(spec(), market(caps, [HERE]), replace(WORK, method="full"))
    assert full is not None
    assert full[0] == "resources"
    assert "no machine can ever serve this job: on 1× rtx4090 at mine: needs" in full[1]
    assert full[1].endswith("use a smaller model or max_length, or method lora or qlora")
    for method, words in (("lora", "max_length, or method qlora"), ("qlora", "a smaller model or max_length")):
        smaller = refusal(spec(), market(caps, [HERE]), replace(WORK, method=method, shape=HUGE))
        assert smaller is not None
        assert smaller[1].endswith(words)
    elsewhere = market({**caps, "a": RENTED}, [HERE])
    named = refusal(spec(resources={"providers": ["mine"]}), elsewhere, replace(WORK, method="full"))
    assert named is not None
    assert named[0] == "resources.providers"
    assert re.search(r"on 1× rtx4090 at mine: needs .*; without providers, \d× .* at a would do$", named[1])
    rented = refusal(
        spec(resources={"accelerators": ["l4"], "gpus": 1}), market({"a": RENTED}), replace(WORK, method="full")
    )
    assert rented is not None
    assert rented[0] in ("resources.gpus", "resources.accelerators")


def test_no_method_is_suggested_that_the_model_refuses() -> None:
    mixture = replace(HUGE, family="mixtral", experts=8, active_experts=2)
    for method, words in (("full", "max_length, or method lora"), ("lora", "use a smaller model or max_length")):
        refused = refusal(spec(), market({"mine": MINE}, [HERE]), replace(WORK, method=method, shape=mixture))
        assert refused is not None
        assert refused[1].endswith(words)
    diffusion = replace(WORK, method="lora", task="text_to_image", shape=HUGE)
    refused = refusal(spec(), market({"mine": MINE}, [HERE]), diffusion)
    assert refused is not None
    assert "qlora" not in refused[1]


def test_more_machines_are_suggested_if_they_would_do() -> None:
    caps = {"mine": replace(MINE, multi_node=True)}
    job = spec(train={"global_batch": 16})
    named = refusal(job, market(caps, [HERE]), replace(WORK, method="full", global_batch=16))
    assert named is not None
    assert named[0] == "resources.nodes"
    assert "nodes of 1× rtx4090 at mine would do" in named[1]


def test_a_machine_without_a_gpu_is_named_last() -> None:
    bare = replace(HERE, id="mine/bare", accelerator="cpu", gpus=0, ram_bytes=10**12)
    job = script(resources={"nodes": 2})
    for offers, words in (([bare, HERE], "one node of 1× rtx4090 at mine"), ([bare], "one node of the CPU at mine")):
        named = refusal(job, market({"mine": MINE}, offers), SCRIPT)
        assert named is not None
        assert words in named[1]


def test_files_of_this_host_need_a_provider_of_this_host() -> None:
    named = refusal(spec(), market({"a": RENTED}, local_files=True))
    assert named is not None
    assert "cannot reach the blob store or model folder on this machine; use a bucket" in named[1]


def test_script_without_checkpoints_is_never_served_by_spot_only() -> None:
    job = script(script={"checkpoints": False}, resources={"spot": "only"})
    named = refusal(job, market({"a": RENTED}), SCRIPT)
    assert named is not None
    assert named[0] == "resources.spot"
    assert "the script writes no checkpoints" in named[1]
    assert "with spot: allowed" in named[1]
