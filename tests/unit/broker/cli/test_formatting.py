"""Sizes, ages and durations as the command line shows them."""

from datetime import UTC, datetime, timedelta

import pytest

from broker.cli.core import formatting
from broker.domain.gpu_names import marketed_gb
from broker.domain.offer import GIB


@pytest.mark.parametrize(
    ("name", "gib", "gb"),
    [
        ("rtx4090", 22.49, 24),
        ("h200-sxm", 131.3, 141),
        ("h100-sxm", 79.6, 80),
        ("h100-nvl", 93.6, 94),
        ("a100-80gb-sxm", 79.2, 80),
        ("l40s", 44.99, 48),
        ("b200", 179.1, 180),
        ("t4", 14.6, 16),
        ("an-unknown-gpu", 10.7, 11),
    ],
)
def test_gpus_have_the_size_by_which_they_are_sold(name: str, gib: float, gb: int) -> None:
    assert marketed_gb(name, round(gib * GIB)) == gb


def test_few_gpu_hours_are_not_shown_as_zero() -> None:
    shown = [formatting.hours_count(hours) for hours in (0, 0.0042, 0.31, 12.5, 1234.5)]
    assert shown == ["0.0", "0.0042", "0.31", "12.5", "1,234.5"]


def test_ages_and_durations_are_short() -> None:
    assert [formatting.short_duration(s) for s in (5, 720, 11_100, 187_200, 900_000)] == [
        "5s",
        "12m",
        "3h05m",
        "2d4h",
        "10d",
    ]
    now = datetime.now(UTC)
    ages = [formatting.short_age(now - timedelta(seconds=s)) for s in (45, 720, 108_000, 259_200)]
    assert ages == ["45s", "12m", "30h", "3d"]
