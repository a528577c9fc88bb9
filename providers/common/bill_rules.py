"""Rules of each cloud's bill, with source and date; offers and docs/guide/clouds.md are built from this table.

Tests compare the table with the bill of the emulated clouds, which has its own figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BillRule:
    """Rules by which a cloud bills one machine."""

    quantum_s: int
    """Billing quantum in seconds: each run is rounded up to a multiple."""
    minimum_s: int
    """Minimum billed seconds of a run."""
    billed_from: Literal["created", "running"]
    """Start of billing that offers assume; never later than the cloud's."""
    disk_from: Literal["created", "running"]
    """Start of billing of the disk."""
    disk_while_stopped: str
    traffic: str
    public_ip_usd_per_hour: Decimal
    """Dollars per hour of a public IPv4 address in addition to the machine; 0: the address is free."""
    source: str
    read_on: str
    """Date on which the source was read."""


BILL_RULES: Mapping[str, BillRule] = {
    "runpod": BillRule(
        quantum_s=1, minimum_s=0, billed_from="created", disk_from="created",
        disk_while_stopped="container disk: no; a volume: $0.20 a GB and month (none is bought)", traffic="free",
        public_ip_usd_per_hour=Decimal(0), read_on="2026-11-28",
        source="docs.runpod.io/pods/storage, docs.runpod.io/pods/pricing",
    ),
    "vast": BillRule(
        quantum_s=1, minimum_s=0, billed_from="created", disk_from="created",
        disk_while_stopped="yes, until the instance is destroyed", traffic="by the host's price for each direction",
        public_ip_usd_per_hour=Decimal(0), read_on="2026-11-28",
        source="docs.vast.ai/guides/serverless/pricing (billing by state), vast.ai/pricing",
    ),
    "lambda": BillRule(
        quantum_s=60, minimum_s=0, billed_from="running", disk_from="running",
        disk_while_stopped="a machine cannot be stopped", traffic="free",
        public_ip_usd_per_hour=Decimal(0), read_on="2026-11-21",
        source="docs.lambda.ai/public-cloud/billing",
    ),
    "aws": BillRule(
        quantum_s=1, minimum_s=60, billed_from="running", disk_from="created",
        disk_while_stopped="yes; the volume is deleted with the machine", traffic="out: by region, in: free",
        public_ip_usd_per_hour=Decimal("0.005"), read_on="2026-11-28",
        source="aws.amazon.com/ec2/pricing/on-demand and /vpc/pricing, as public pages restate them",
    ),
}  # fmt: skip
"""Rule by cloud. Vast bills the disk from the create, and the GPU from running; offers assume the create."""
