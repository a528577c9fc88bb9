"""AWS's answers in unusual forms: an odd value costs itself alone, and proves no machine absent."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.offer import GpuAsk
from providers.aws.api import error_for_code
from providers.aws.provider import TAG, AwsCloud, AwsConfig
from providers.common.market_rules import OfferFilter
from tests.unit.providers.aws.world import EAST, NAME, OURS, handle
from tests.unit.providers.clocks import SteppedClock

L40S, H100 = "g6e.xlarge", "p5.48xlarge"


class Answers:
    """Answers by operation, as botocore parses them: AWS's own rows with the changes of a test."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {
            "describe_instance_types": [instance_type(L40S, "L40S", 1, 45_776), instance_type(H100, "H100", 8, 81_920)],
            "describe_instance_type_offerings": [
                {"InstanceType": name, "Location": f"{EAST}a"} for name in (L40S, H100)
            ],
            "describe_spot_price_history": [spot(L40S, "0.60"), spot(H100, "20")],
            "list_service_quotas": [],
            "get_spot_placement_scores": [],
            "describe_instances": [],
        }
        self.prices: dict[str, list[Any]] = {L40S: [product("1.861")], H100: [product("55.04")], "gp3": []}
        self.answers: dict[str, Any] = {
            "describe_availability_zones": {"AvailabilityZones": [{"ZoneName": f"{EAST}a", "ZoneId": "use1-az1"}]}
        }

    async def pages(self, service: str, region: str, operation: str, key: str, **parameters: Any) -> Any:
        if operation == "get_products":
            wanted = {row["Field"]: row["Value"] for row in parameters["Filters"]}
            return self.prices.get(wanted.get("instanceType", wanted.get("volumeApiName", "")), [])
        return self.rows[operation]

    async def call(self, service: str, region: str, operation: str, **parameters: Any) -> Any:
        return self.answers[operation]


def instance_type(name: str, gpu: str, count: object, mib: int, **changes: Any) -> dict[str, Any]:
    gpus = [{"Name": gpu, "Manufacturer": "NVIDIA", "Count": count, "MemoryInfo": {"SizeInMiB": mib}}]
    return {
        "InstanceType": name, "GpuInfo": {"Gpus": gpus}, "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": 8}, "MemoryInfo": {"SizeInMiB": 65_536},
        "SupportedUsageClasses": ["on-demand", "spot"],
    } | changes  # fmt: skip


def spot(name: str, price: object, **changes: Any) -> dict[str, Any]:
    return {
        "InstanceType": name, "AvailabilityZone": f"{EAST}a", "SpotPrice": price,
        "Timestamp": datetime(2026, 1, 1, tzinfo=UTC),
    } | changes  # fmt: skip


def product(usd: object, **attributes: Any) -> str:
    terms = {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": usd}}}}}}
    return json.dumps({"product": {"attributes": {"regionCode": EAST, **attributes}}, "terms": terms})


@pytest.fixture
def aws() -> Answers:
    return Answers()


@pytest.fixture
async def cloud(aws: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AwsCloud]:
    config = AwsConfig(regions=(EAST,))
    cloud = AwsCloud(config, installation=OURS, clock=SteppedClock(), env={}, home=tmp_path)
    monkeypatch.setattr(cloud._aws, "pages", aws.pages)
    monkeypatch.setattr(cloud._aws, "call", aws.call)
    yield cloud
    await cloud.close()


async def sold(cloud: AwsCloud) -> tuple[set[tuple[str, bool]], dict[str, int]]:
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    return {(offer.instance_type, offer.spot) for offer in offer_filter.offers}, dict(offer_filter.dropped)


ALL = {(L40S, False), (L40S, True), (H100, False), (H100, True)}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (instance_type("g6f.large", "L4", 0, 2861), "share of a GPU"),
        (instance_type("g6f.large", "L4", None, 2861), "share of a GPU"),
        (instance_type("p9.large", "H100", 8, 0), "memory"),
        (instance_type("p9.large", "H100", 8, 81_920, ProcessorInfo={"SupportedArchitectures": []}), "unreadable"),
        (instance_type("p9.large", "H100", 8, 81_920, ProcessorInfo={}), "unreadable"),
        (instance_type("p9.large", "GB200", 4, 190_000), "ARM processor: the image is for x86-64"),
        (instance_type("p9.large", "H100", 8, 81_920, VCpuInfo={}), "unreadable"),
        (instance_type("p9.large", "H100 MIG 1g.10gb", 8, 10_240), "share of a GPU"),
    ],
)
async def test_an_odd_instance_type_costs_itself_alone(aws: Answers, cloud: AwsCloud, row: Any, why: str) -> None:
    aws.rows["describe_instance_types"].append(row)
    offers, dropped = await sold(cloud)
    assert offers == ALL
    assert why == "memory" or set(dropped) == {why}


@pytest.mark.parametrize("share", [{"GpuPartitionSize": 0.125, "LogicalGpuCount": 0.125}, {"LogicalGpuCount": 0.5}])
async def test_a_share_of_a_gpu_is_known_by_its_new_fields(aws: Answers, cloud: AwsCloud, share: Any) -> None:
    row = instance_type("g6f.large", "L4", 1, 22_888)
    row["GpuInfo"]["Gpus"][0] |= share
    aws.rows["describe_instance_types"].append(row)
    assert await sold(cloud) == (ALL, {"share of a GPU": 1})


@pytest.mark.parametrize("row", ["", "{", "[]", "null", "{}", '{"product": null}', product(None), product("NaN"), None])
async def test_an_odd_product_costs_itself_alone(aws: Answers, cloud: AwsCloud, row: Any) -> None:
    aws.prices[L40S].insert(0, row)
    offer_filter = OfferFilter(GpuAsk())
    await cloud.rows(offer_filter)
    (fixed,) = [o for o in offer_filter.offers if o.instance_type == L40S and not o.spot]
    assert fixed.usd_per_hour == Decimal("1.861")


@pytest.mark.parametrize(
    ("operation", "row"),
    [
        ("list_service_quotas", {"QuotaName": "Running On-Demand P instances", "Value": None}),
        ("list_service_quotas", {"Value": 5.0}),
        ("get_spot_placement_scores", {"AvailabilityZoneId": "use1-az1", "Score": None}),
        ("get_spot_placement_scores", {"Region": EAST, "Score": 3}),
    ],
)
async def test_odd_quotas_and_scores_cost_no_other(aws: Answers, cloud: AwsCloud, operation: str, row: Any) -> None:
    aws.rows[operation] = [
        row, {"QuotaName": "Running On-Demand G and VT instances", "Value": 0.0},
        {"AvailabilityZoneId": "use1-az1", "Score": 3},
    ]  # fmt: skip
    offers, _ = await sold(cloud)
    assert offers == (ALL - {(L40S, False)} if operation == "list_service_quotas" else ALL)


@pytest.mark.parametrize(
    "row",
    [
        spot(L40S, None), spot(L40S, ""), spot(L40S, "free"), spot(L40S, "Infinity"), {"InstanceType": L40S}, None,
        spot(L40S, "0.70", Timestamp=None), spot(L40S, "0.70", AvailabilityZone=None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 2])
async def test_an_odd_spot_price_costs_itself_alone(aws: Answers, cloud: AwsCloud, row: Any, at: int) -> None:
    aws.rows["describe_spot_price_history"].insert(at, row)
    assert (await sold(cloud))[0] == ALL


async def test_spot_rows_that_are_all_odd_leave_on_demand(aws: Answers, cloud: AwsCloud) -> None:
    aws.rows["describe_spot_price_history"] = [spot(L40S, "Infinity"), spot(H100, None)]
    assert (await sold(cloud))[0] == {(L40S, False), (H100, False)}


async def test_an_answer_that_cannot_be_read_is_no_answer(aws: Answers, cloud: AwsCloud) -> None:
    aws.answers["describe_availability_zones"] = {}
    with pytest.raises(OutcomeUnknown, match="AWS: an answer about us-east-1 cannot be read"):
        await sold(cloud)


@pytest.mark.parametrize("row", [None, {}, {"ZoneName": None, "ZoneId": "x"}, {"ZoneName": f"{EAST}b"}])
async def test_an_odd_zone_costs_itself_alone(aws: Answers, cloud: AwsCloud, row: Any) -> None:
    aws.answers["describe_availability_zones"]["AvailabilityZones"].append(row)
    aws.rows["describe_instance_type_offerings"] += [row, {"InstanceType": L40S}, {"Location": f"{EAST}a"}]
    assert (await sold(cloud))[0] == ALL


def listed(**changes: Any) -> list[Any]:
    tags = [{"Key": TAG, "Value": f"{NAME}-1a2b3c4d"}]
    machine = {"InstanceId": "i-1", "InstanceType": L40S, "State": {"Name": "running"}, "Tags": tags} | changes
    return [{"Instances": [{name: value for name, value in machine.items() if value is not ...}]}]


@pytest.mark.parametrize("changes", [{"State": ...}, {"InstanceId": ...}, {"Tags": [{"Key": TAG}]}, {"Tags": [{}]}])
async def test_a_machine_that_cannot_be_read_makes_the_listing_unknown(
    aws: Answers, cloud: AwsCloud, changes: dict[str, Any]
) -> None:
    aws.rows["describe_instances"] = listed()
    assert [o.handle.id for o in await cloud.list()] == ["i-1"]
    aws.rows["describe_instances"] = listed(**changes)
    with pytest.raises(OutcomeUnknown):
        await cloud.list()


@pytest.mark.parametrize("machines", [[], None, [{"InstanceId": "i-2", "PreviousState": {"Name": "terminated"}}]])
async def test_a_termination_without_the_machine_proves_nothing(aws: Answers, cloud: AwsCloud, machines: Any) -> None:
    aws.answers["terminate_instances"] = {"TerminatingInstances": machines}
    with pytest.raises(OutcomeUnknown):
        await cloud.destroy(handle("i-1"))


async def test_a_termination_of_a_terminated_machine_is_gone(aws: Answers, cloud: AwsCloud) -> None:
    row = {"InstanceId": "i-1", "PreviousState": {"Name": "running"}}
    aws.answers["terminate_instances"] = {"TerminatingInstances": [row]}
    await cloud.destroy(handle("i-1"))
    row["PreviousState"] = {"Name": "terminated"}
    with pytest.raises(Gone):
        await cloud.destroy(handle("i-1"))


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("403", 403, OutcomeUnknown),
        ("404", 404, OutcomeUnknown),
        ("400", 400, OutcomeUnknown),
        ("429", 429, Throttled),
        ("Client.RequestLimitExceeded", 503, Throttled),
        ("Server.InsufficientInstanceCapacity", 500, NoCapacity),
        ("Client.InvalidInstanceID.NotFound", 400, Gone),
        ("Server.InternalError", 500, OutcomeUnknown),
        ("UnauthorizedOperation", 403, Rejected),
        ("VcpuLimitExceeded", 400, Rejected),
    ],
)
def test_errors_of_proxies_and_prefixed_codes_are_read(code: str, status: int, error: type[ProviderError]) -> None:
    assert type(error_for_code("describe", code, "a message", status)) is error
