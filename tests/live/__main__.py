"""`python -m tests.live --read-only` reads only prices and listings of the real clouds; see docs/guide/clouds.md.

With `--max-usd` and `--yes-spend-money` the command instead runs scenarios on rented machines.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tests.live.calls import explain
from tests.live.look import NAMES, CloudFindings, look, missing

EPILOG = "The last line is a JSON document; exit 1: a field that the broker needs differs, 2: wrong arguments."


def main(argv: list[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    endpoints = dict(one.partition("=")[::2] for one in asked.endpoint)
    clouds = asked.cloud or list(NAMES)
    if unknown := [name for name in (*clouds, *endpoints) if name not in NAMES]:
        return _refuse(f"there is no cloud {unknown[0]}; one of {', '.join(NAMES)}")
    if asked.explain:
        if not asked.read_only:
            return _refuse("--explain lists the calls of --read-only; give both")
        print(explain(clouds))
        return 0
    if asked.read_only:
        if asked.max_usd is not None or asked.yes_spend_money:
            return _refuse("--read-only spends nothing: give neither --max-usd nor --yes-spend-money with it")
        return asyncio.run(_read_only(clouds, endpoints, named=bool(asked.cloud)))
    if asked.max_usd is None or not asked.yes_spend_money:
        return _refuse("give --read-only; or, to rent machines for money, both --max-usd USD and --yes-spend-money")
    if not asked.cloud or asked.config is None:
        return _refuse("name each cloud that may be bought from (--cloud), and a --config with a bucket as blob store")
    from tests.live.spend import SCENARIOS, begin

    return begin(asked.cloud, asked.max_usd, asked.config, asked.scenario or list(SCENARIOS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.live", description=(__doc__ or "").splitlines()[0], epilog=EPILOG
    )
    parser.add_argument("--read-only", action="store_true", help="prices and listings; nothing else can be sent")
    parser.add_argument("--explain", action="store_true", help="print the calls of --read-only; call nothing, no keys")
    parser.add_argument("--cloud", action="append", default=[], metavar="NAME", help="only this one; repeat")
    parser.add_argument(
        "--endpoint", action="append", default=[], metavar="CLOUD=URL", help="of an emulator; read-only only"
    )
    parser.add_argument("--max-usd", type=_usd, metavar="USD", help="all jobs together never spend more")
    parser.add_argument("--yes-spend-money", action="store_true", help="rent machines")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a gpubroker.yaml: its blobs, grants, trainer, …")
    parser.add_argument("--scenario", action="append", default=[], metavar="NAME", help="only this one; repeat")
    return parser


def _usd(text: str) -> Decimal:
    try:
        usd = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of dollars") from None
    if not 0 < usd <= 1000:
        raise argparse.ArgumentTypeError("give more than 0, and at most 1000 dollars")
    return usd


def _refuse(why: str) -> int:
    print(f"tests.live: {why}", file=sys.stderr)
    return 2


async def _read_only(clouds: list[str], endpoints: Mapping[str, str], *, named: bool) -> int:
    """Check the clouds by reads only. `named`: the user named the clouds, so a missing key is a failure."""
    found = []
    for cloud in clouds:
        if why := missing(cloud, os.environ, Path.home()):
            one = CloudFindings(cloud=cloud, skipped=why, error="no key" if named else "")
        else:
            one = await look(cloud, endpoints.get(cloud), os.environ, Path.home())
        found.append(one)
        _show(one)
    ok = all(one.ok for one in found)
    print(json.dumps({"clouds": {one.cloud: _document(one) for one in found}, "ok": ok}))
    return 0 if ok else 1


def _show(found: CloudFindings) -> None:
    if found.skipped:
        print(f"{found.cloud}: skipped: {found.skipped}")
        return
    dropped = ", ".join(f"{count} {why}" for why, count in found.dropped.items())
    print(
        f"{found.cloud}: {found.calls} calls, {found.offers} offers, {found.machines} machines of the account; "
        f"{found.unseen} fields were in no answer{f'; dropped: {dropped}' if dropped else ''}"
    )
    for text in (*found.notes, *filter(None, [found.error])):
        print(f"  {text}")
    width = max((len(difference.field) for difference in found.differences), default=0)
    for difference in found.differences:
        print(f"  {'NEEDED ' if difference.needed else '       '}{difference.field:<{width}}  {difference.what}")


def _document(found: CloudFindings) -> dict[str, Any]:
    if found.skipped:
        return {"skipped": found.skipped, "ok": found.ok}
    return {
        "ok": found.ok, "error": found.error or None, "calls": found.calls, "offers": found.offers,
        "machines": found.machines, "dropped": dict(found.dropped), "unseen": found.unseen,
        "differences": [{"field": d.field, "what": d.what, "needed": d.needed} for d in found.differences],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
