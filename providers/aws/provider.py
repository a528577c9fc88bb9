"""AWS provider: spot and on-demand machines of several regions through EC2's API; images run by `docker run`.

A purchase supplies rows of SkyPilot's catalog file `aws/vms.csv`. SkyPilot downloads `aws/images.csv` (the AMI of each
region by tag) and `aws/instance_quota_mapping.csv` if they are missing. `vms.csv` has zone ids (`use1-az1`), but a
launch needs zone names. SkyPilot asks AWS for the account's names and stores them in `aws/az_mappings-<account>.csv`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.domain.errors import Gone, OutcomeUnknown, Rejected
from broker.domain.ids import Installation, name_prefix
from broker.domain.instance import BootSpec, Caps, InstanceState, Observed
from broker.domain.job import Handle
from broker.domain.offer import GIB, Offer
from broker.ports import Clock
from providers.aws import confirm as aws_confirm
from providers.aws.api import Aws
from providers.aws.market import KNOWN_GPUS, AwsMarket, InstanceTypes
from providers.aws.offers import AwsOffers
from providers.common.bill_rules import BILL_RULES
from providers.common.cloud import Purchase
from providers.common.credentials import aws_source, digest_of, sky_files
from providers.common.market_rules import OfferFilter
from providers.common.skypilot_names import cluster_of, gpu_columns
from trainer.contract.base import Config

REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-north-1")
TAG = "skypilot-cluster-name"
"""Tag that SkyPilot sets in the create call, so each machine of this installation has it."""
CAPS = Caps(
    spot=True,
    notice_s=120.0,
    notices="imds",
    list_lag_s=20.0,
    boot_s=300.0,
    boot_deadline_s=2400.0,
    billing_quantum_s=BILL_RULES["aws"].quantum_s,
    multi_node=True,
    accelerators=KNOWN_GPUS,
    self_stop="os_shutdown",
    agent_start_s=600.0,
)
"""Capabilities of AWS; machines are billed by the second, from running to shutting down."""
_STATES = {
    "pending": InstanceState.STARTING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.STOPPED,
    "stopped": InstanceState.STOPPED,
    "shutting-down": InstanceState.STOPPED,
    "terminated": InstanceState.GONE,
}


class AwsConfig(Config):
    """Settings of AWS."""

    endpoint: str | None = None
    """`http://host:port` of an emulator of all services; `AWS_ENDPOINT_URL_<SERVICE>` has priority. Default: AWS."""
    emulated: bool = False
    """true: the endpoint is an emulator whose machines compute on a CPU and cost nothing."""
    regions: tuple[str, ...] = ()
    """Regions to buy in; empty: us-east-1, us-east-2, us-west-2, eu-north-1.

    The broker does not list machines in a removed region, so remove a region only when no machine runs there.
    """


class AwsCloud:
    """AWS implementation of `providers.common.cloud.Cloud`."""

    name = "aws"
    caps = CAPS
    docker_run = True

    def __init__(
        self, config: AwsConfig, *, installation: Installation, clock: Clock, env: Mapping[str, str], home: Path
    ) -> None:
        self._config, self._installation = config, installation
        self._regions = config.regions or REGIONS
        self._aws = Aws(config.endpoint, env=env, home=home)
        self._env, self._home = env, home
        self._files = ""
        """Digest of the credential files with which the session was opened."""
        self._market = AwsMarket(self._aws, clock, self._regions)
        self._offers = AwsOffers(self._market, clock, self._regions)

    async def rows(self, offer_filter: OfferFilter) -> None:
        await self._offers.rows(offer_filter)

    async def list(self) -> Sequence[Observed]:
        """List the machines of all regions. Raises if one region fails, because its machines would seem absent."""
        listings = await asyncio.gather(*(self._list(region) for region in self._regions))
        return [machine for listing in listings for machine in listing]

    async def _list(self, region: str) -> Sequence[Observed]:
        filters = [{"Name": f"tag:{TAG}", "Values": [f"{name_prefix(self._installation)}*"]}]
        reservations = await self._aws.pages("ec2", region, "describe_instances", "Reservations", Filters=filters)
        machines = [machine for reservation in reservations for machine in reservation["Instances"]]
        kinds = await self._market.kinds.get_or(region, InstanceTypes()) if machines else InstanceTypes()
        try:
            observations = [self._observed(region, machine, kinds) for machine in machines]
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as e:
            # A partial listing would prove the absence of the machines that are missing in it.
            raise OutcomeUnknown(f"AWS: a machine of the listing of {region} cannot be read: {e!r}") from None
        return [observed for observed in observations if observed is not None]

    def _observed(self, region: str, machine: Mapping[str, Any], kinds: InstanceTypes) -> Observed | None:
        label = next((tag["Value"] for tag in machine.get("Tags", []) if tag["Key"] == TAG), None)
        name = cluster_of(self._installation, label)
        if name is None:
            return None
        kind = kinds.machines.get(machine["InstanceType"])
        spot = machine.get("InstanceLifecycle") == "spot"
        return Observed(
            handle=Handle(provider="aws", id=machine["InstanceId"], name=name, region=region),
            state=_STATES.get(machine["State"]["Name"], InstanceState.UNKNOWN),
            accelerator=kind.accelerator if kind else None,
            gpus=kind.gpus if kind else None,
            gpu_memory_bytes=kind.gpu_memory_bytes if kind else None,
            spot=spot,
            usd_per_hour=self._price(region, machine, spot=spot),
            price_moves=spot,
            created_at=machine.get("LaunchTime"),
        )

    def _price(self, region: str, machine: Mapping[str, Any], *, spot: bool) -> Decimal | None:
        """Return the machine's dollars per hour, or None if the price is not known.

        EC2 does not report a spot machine's price; AWS bills the current market price.
        """
        if not spot:
            return self._offers.price(region, machine["InstanceType"])
        zone = machine.get("Placement", {}).get("AvailabilityZone")
        return None if zone is None else self._offers.spot_price(region, machine["InstanceType"], zone)

    async def destroy(self, handle: Handle) -> None:
        if not handle.region:
            raise Rejected(f"AWS: it is not known in which region {handle.id} is; destroy it in AWS's console")
        answer = await self._aws.call("ec2", handle.region, "terminate_instances", InstanceIds=[handle.id])
        machines = answer.get("TerminatingInstances") or []
        before = [(m.get("PreviousState") or {}).get("Name") for m in machines if m.get("InstanceId") == handle.id]
        if not before:
            raise OutcomeUnknown(f"AWS: the answer does not say that {handle.id} ends")
        if all(state == "terminated" for state in before):
            raise Gone(f"AWS: {handle.id} is terminated")

    async def check(self) -> str | None:
        """Check the identity and the right to list machines. Prices and launches need more: see deploy/iam/aws.json."""
        region = self._regions[0]
        await self._aws.call("sts", region, "get_caller_identity")
        listed_regions = self._aws.regions("ec2")
        unknown = [name for name in self._regions if name not in listed_regions]
        if self._config.endpoint is None and unknown:
            return f"AWS: there is no region {unknown[0]}; correct providers.aws.regions"
        try:
            await self._aws.call("ec2", region, "describe_instances", DryRun=True)
        except Rejected as e:
            if "DryRunOperation" not in str(e):
                raise
        return None

    def source(self) -> str:
        return self._aws.source or aws_source(self._env, self._home) or "no credentials"

    async def credential(self) -> str:
        """Return the digest of the credential files and the id of the access key in use.

        A credential process, a role or a container may supply another key while no file changes.
        """
        if (files := digest_of(sky_files("aws", self._env, self._home))) != self._files:
            self._aws.forget_credentials()
            self._files = files
        return f"{files}/{await self._aws.key_id()}"

    async def account(self) -> Sequence[str]:
        identity = await self._aws.call("sts", self._regions[0], "get_caller_identity")
        return (str(identity["Account"]),)

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        """Return the purchase of an offer.

        `pin` has options that SkyPilot lacks: the volume's `kms_key`, and `placement_group`, the prefix of its name.
        With `network_tier` "best" SkyPilot 0.14 attaches an EFA interface, but it never creates a placement group.
        """
        options = boot.options
        aws: dict[str, object] = {"disk_encrypted": options.encrypted_volume, "remote_identity": "NO_UPLOAD"}
        if options.vpc is not None:
            aws["vpc_name"] = options.vpc
        if options.subnets:
            aws["subnet_names"] = list(options.subnets)
        pin = {} if options.kms_key is None else {"kms_key": options.kms_key}
        if boot.nodes > 1:
            pin["placement_group"] = name_prefix(self._installation)
        return Purchase(
            cloud="aws",
            region=offer.region,
            zone=offer.purchase.get("zone"),
            instance_type=offer.instance_type,
            use_spot=offer.spot,
            disk_gb=-(-offer.disk_bytes // GIB),  # EC2 counts in GiB
            catalog={"aws/vms.csv": _rows(offer)},
            config={"aws": aws},
            pin=pin,
            network_tier="best" if boot.nodes > 1 else None,
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        await aws_confirm.confirm(self._aws, handle, purchase)

    async def close(self) -> None:
        self._aws.close()


def _rows(offer: Offer) -> list[Mapping[str, str]]:
    """Return one catalog row per zone. SkyPilot ranks by these prices and offers no spot machine without a price."""
    zones = [zone.partition("=") for zone in offer.purchase["zones"].split(",")]
    return [
        {
            "InstanceType": offer.instance_type,
            **gpu_columns(offer),
            "Price": offer.purchase.get("on_demand", ""),
            "SpotPrice": price,
            "Region": offer.region,
            "AvailabilityZone": zone,
            "Arch": "x86_64",
        }
        for zone, _, price in zones
    ]
