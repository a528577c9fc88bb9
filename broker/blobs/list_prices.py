"""What the usual blob stores ask for a GiB-month of ordinary storage: list prices, which an operator may overrule.

Checked 2026-11: S3 Standard $0.023 (us-east-1, first 50 TB), Cloudflare R2 $0.015, Google Cloud Storage Standard $0.020
(us regions), Azure Blob hot LRS $0.018. Other S3 is taken for S3. Sources: docs/design/money.md.
"""

from collections.abc import Mapping
from decimal import Decimal
from urllib.parse import urlsplit

S3, R2, GCS, AZURE = Decimal("0.023"), Decimal("0.015"), Decimal("0.020"), Decimal("0.018")
R2_HOST = ".r2.cloudflarestorage.com"


def storage_usd_per_gib_month(url: str, options: Mapping[str, str]) -> Decimal:
    """By the kind of store; 0 for a folder, which is the operator's own disk."""
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        return R2 if any(R2_HOST in value.lower() for value in options.values()) else S3
    return {"gs": GCS, "az": AZURE}.get(scheme, Decimal(0))
