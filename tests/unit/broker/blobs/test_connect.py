"""A store's kind decides its list price, unless the operator configures another one."""

from decimal import Decimal
from pathlib import Path

import pytest

from broker.blobs.connect import storage_usd_per_gib_month
from broker.daemon.app import costs_of
from broker.daemon.config import DaemonConfig
from broker.domain.spec import Retention


@pytest.mark.parametrize(
    ("url", "options", "price"),
    [
        ("file:///folder", {}, "0"),
        ("s3://bucket/prefix", {"aws_region": "us-east-1"}, "0.023"),
        ("s3://bucket", {"aws_endpoint": "https://x.r2.cloudflarestorage.com"}, "0.015"),
        ("gs://bucket", {}, "0.020"),
        ("az://container", {}, "0.018"),
    ],
)
def test_each_kind_has_its_list_price(url: str, options: dict[str, str], price: str) -> None:
    assert storage_usd_per_gib_month(url, options) == Decimal(price)


def test_the_configuration_reaches_the_controllers(tmp_path: Path) -> None:
    said = DaemonConfig.model_validate(
        {
            "home": tmp_path, "blobs": "s3://bucket", "storage_usd_per_gib_month": "0.006",
            "retention": {"logs_days": 1, "uploads_days": None}, "guard": {"price_rise_percent": 5},
        }
    )  # fmt: skip
    costs = costs_of(said)
    assert costs.storage_usd_per_gib_month == Decimal("0.006")
    assert costs.price_rise == Decimal("0.05")
    assert costs.uploads_days is None
    assert costs.retention == Retention(checkpoints_days=30, logs_days=1, data_days=30)
    assert costs_of(DaemonConfig(home=tmp_path, blobs="s3://bucket")).storage_usd_per_gib_month == Decimal("0.023")
