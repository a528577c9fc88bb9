"""Values to try for each parameter of a call: red's own, blue's, and unused ones."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from broker.domain.ids import base32, job_id
from tests.api.harness import spec
from tests.security.drivers import Unplayed
from tests.security.world import BLUE, PERSON, RED, World, data_set

Tries = Sequence[tuple[str, Any]]
"""(description, value) pairs. The description is part of the label; the value differs between worlds."""


class ParameterValues:
    """Values to try for each parameter and each body."""

    def __init__(self, world: World) -> None:
        own, other = world.own, world.other
        jobs = [(f"own {name}", job) for name, job in own.jobs.items()]
        jobs += [(f"other {name}", job) for name, job in other.jobs.items()]
        self._jobs: Tries = [*jobs, ("nobody's", job_id(os.urandom(9)))]
        teams = [("red", RED), ("blue", BLUE), ("green", "green")]
        times = [("before all", "2026-01-01T00:00:00Z"), ("after all", "2099-01-01T00:00:00Z")]
        people = [("ann", PERSON), ("blue's", "bob")]
        sides = ((own, "own"), (other, "other"))
        self.by_schema = _bodies(world, self._jobs)
        self.by_name: dict[str, Tries] = {
            "job_id": self._jobs,
            "path": [("own or other", "plan.txt"), ("none", "nothing.txt")],
            "token_id": [("own", own.token), ("other", other.token), ("nobody's", base32(os.urandom(5), 8))],
            "team": teams,
            "channel_id": [("own", own.channel), ("other", other.channel)],
            "label": [("ann", "who:ann"), ("red", "team:red"), ("blue", "team:blue")],
            "state": [("queued", "queued"), ("active", "active"), ("failed", "failed")],
            "owner": people, "actor": people, "user": people,
            "since": times, "until": times,
            "limit": [("1", "1"), ("3", "3")],
            "cursor": [(what, world.cursor(side.jobs["running"])) for side, what in sides],
            "after": [("1", "1"), ("99", "99")],
            "follow": [("0", "0")], "tail": [("1", "1")], "timestamps": [("1", "1")],
            "attempt": [("1", "1"), ("2", "2")], "number": [("1", "1"), ("2", "2")],
            "resume": [("0", "0")], "replaces": [("0", "0"), ("7", "7")],
            "provider": [("one", "simulated")], "cloud": [("one", "alpha"), ("none", "beta")],
            "accelerator": [("one", "l40s")], "gpu": [("one", "l40s")], "gpus": [("1", "1")], "points": [("9", "9")],
            "region": [("one", "eu")], "market": [("spot", "spot"), ("on-demand", "on-demand")],
            "format": [("csv", "csv"), ("jsonl", "jsonl")],
            "sha256": [(what, side.ref.removeprefix("upload:")) for side, what in sides],
            "action": [("submit", "job.submit"), ("tokens", "token"), ("teams", "team")],
            "target": [(what, side.jobs["running"]) for side, what in sides] + [("BLUE_ONLY", "BLUE_ONLY")],
            "by": [(way, way) for way in ("user", "team", "cloud", "gpu", "day", "month")],
            "kind": [("logs", "logs"), ("data", "data")],
            "days": [("1", "1"), ("30", "30")],
            "zone": [("Berlin", "Europe/Berlin")],
            "workspace": [("one", "T1")],
            "Idempotency-Key": [("own", "queued"), ("shared", "shared")],
            "Last-Event-ID": [("1", "1"), ("other's", f"{other.attempt};0/boot-0")],
        }  # fmt: skip
        self._by_operation: dict[tuple[str, str], Tries] = {
            ("set_secret", "name"): [("KEY", "KEY"), ("BLUE_ONLY", "BLUE_ONLY")],
            ("delete_secret", "name"): [("KEY", "KEY"), ("BLUE_ONLY", "BLUE_ONLY")],
            ("upload", "name"): [("words", "words.csv"), ("code", "code.tar")],
            ("list_audit", "cursor"): [("any", world.cursor(str(uuid4())))],
            ("apply_policy", "name"): [("limit", "limit")],
            ("delete_policy", "name"): [("limit", "limit"), ("none", "none")],
            ("get_policy_history", "name"): [("limit", "limit"), ("none", "none")],
            ("unlink_slack_user", "user"): [("U1", "U1"), ("U2", "U2")],
        }

    def of(self, name: str, operation: Mapping[str, Any]) -> Tries:
        found = self._by_operation.get((operation["operationId"], name)) or self.by_name.get(name)
        if found is None:
            raise Unplayed(f"{operation['operationId']} takes {name}: give values to try in tried.py")
        return found

    def bodies(self, operation: Mapping[str, Any]) -> Tries:
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return [("", None)]
        ref = next(iter(content.values()))["schema"].get("$ref", operation["operationId"])
        name = re.sub(r"-(In|Out)put$", "", ref.rsplit("/", 1)[-1])
        if name not in self.by_schema:
            raise Unplayed(f"{operation['operationId']} takes a {name}: give bodies to try in tried.py")
        return self.by_schema[name]


def _bodies(world: World, jobs: Tries) -> dict[str, Tries]:
    """Return the bodies to try by the name of their schema, or by the operation if there is none."""
    own, other = world.own, world.other
    hook = {"kind": "webhook", "name": "hook", "secrets": {"url": "https://hook.invalid/"}}
    token, link, teams = {"owner": PERSON, "scopes": ["read"]}, {"user": "U2", "owner": PERSON}, (RED, BLUE, "green")
    policy = {"name": "limit", "team": RED, "max_jobs": 40, "budgets": [{"limit_usd": "30", "per": "day"}]}
    specs: list[tuple[str, Any]] = [
        (" own data", spec(own.ref)),
        (" other's data", spec(other.ref)),
        (" other's archive", spec(own.ref, train=None, script={"code": other.archive, "command": ["a"]})),
        (" a secret of both", spec(own.ref, secrets=["KEY"])),
        (" other's secret", spec(own.ref, secrets=["BLUE_ONLY"])),
        (" over the limit", spec(own.ref, cap_usd="60")),
        *((f" from {what}", spec(own.ref, init_from=f"job/{job}")) for what, job in jobs),
    ]
    return {
        "JobSpec": specs,
        "QuoteSpec": specs,
        "Policy": [(" own", policy), *((f" of {team}", {**policy, "team": team}) for team in (None, BLUE, "green"))],
        "Approval": [(" its cap", {}), (" more", {"up_to_usd": "70"})],
        "CapChange": [(" to 9", {"cap_usd": "9"}), (" to 1", {"cap_usd": "1"})],
        "DataImport": [(" nowhere", {"source": "https://data.invalid/words.csv"})],
        "WhatIfRequest": [(" unknown model", {"model": "none/none"})],
        "SecretValue": [(" to x", {"value": "x"})],
        "TokenRequest": [
            (" own", token),
            (" admin", {**token, "scopes": ["admin"]}),
            *((f" of {team}", {**token, "team": team}) for team in teams),
        ],
        "TeamRequest": [(f" {team}", {"name": team}) for team in teams],
        "upload": [(f" {mark}", data_set(mark)) for mark in ("red's own", "blue's own")],
        "ChannelRequest": [
            (" again", hook),
            (" new", {**hook, "name": "h1"}),
            (" of all", {**hook, "installation": True}),
            *((f" of {team}", {**hook, "name": "h2", "team": team}) for team in teams),
        ],
        "ChannelChange": [(" off", {"enabled": False}), (" on", {"enabled": True})],
        "slack_request": [(" unsigned", b"payload=%7B%7D")],
        "SlackLinkRequest": [(" own", link), *((f" of {team}", {**link, "team": team}) for team in teams)],
    }
