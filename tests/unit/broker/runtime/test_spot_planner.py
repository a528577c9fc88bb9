"""Spot plans are built by another process, once for all callers, and decisions wait for them for a bounded time."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import pytest

from broker.quote.spot import plan as plans
from broker.quote.spot.plan import PlanNotReady, SpotAction, SpotPlan, SpotPlanCache, SpotPlanKey
from broker.runtime.spot_plan_process import LENGTH, serve
from broker.runtime.spot_planner import COMMAND, InlinePlans, SpotPlanner

KEY = SpotPlanKey(horizon_min=360.0, slack_min=180.0, changeover_min=6.0, price=0.3, fall=0, rise=0)
KEYS = [replace(KEY, rise=rise) for rise in range(-3, 3)]
COUNTED = """
import sys
from pathlib import Path
from broker.runtime import spot_plan_process

def lines():
    for line in sys.stdin.buffer:
        with Path({log!r}).open("ab") as log:
            log.write(line)
        yield line

spot_plan_process.serve(lines(), sys.stdout.buffer)
"""
"""The process of the daemon, which also writes down each key that it builds."""
HUNG = "import sys; sys.stdin.read()"
BROKEN = "raise SystemExit(1)"


@asynccontextmanager
async def planner(code: str = "", *, wait_s: float = 60.0, build_limit_s: float = 60.0) -> AsyncIterator[SpotPlanner]:
    command = (sys.executable, "-c", code) if code else COMMAND
    spot_planner = SpotPlanner(cache=SpotPlanCache(), wait_s=wait_s, build_limit_s=build_limit_s, command=command)
    try:
        yield spot_planner
    finally:
        await spot_planner.close()


def costs(plan: SpotPlan | None) -> list[float]:
    assert plan is not None
    return [plan.cost(action, 300.0, 120.0, state) for action in SpotAction for state in (0, 8, 12) if state or action]


def decision(
    source: Callable[[SpotPlanKey], SpotPlan | None], key: SpotPlanKey
) -> Callable[[], Awaitable[list[float] | None]]:
    async def decide() -> list[float] | None:
        plan = source(key)
        return None if plan is None else costs(plan)

    return decide


async def test_the_process_builds_plans_and_the_daemon_none() -> None:
    expected = {key: costs(SpotPlan(key)) for key in KEYS}
    with patch.object(SpotPlan, "_fill_tables", side_effect=AssertionError("built in the daemon's process")):
        async with planner() as made:
            turn = made.begin()
            decided = await asyncio.gather(*(turn.settle(decision(turn, key)) for key in KEYS))
            assert dict(zip(KEYS, decided, strict=True)) == expected


async def test_many_jobs_share_one_build_of_a_key(tmp_path: Path) -> None:
    log = tmp_path / "keys"
    async with planner(COUNTED.format(log=str(log))) as made:
        turns = [made.begin() for _ in range(20)]
        await asyncio.gather(*(turn.settle(decision(turn, KEYS[n % 2])) for n, turn in enumerate(turns)))
    assert len(log.read_text().splitlines()) == 2


async def test_no_plan_in_time_leads_to_the_rule_without_a_model() -> None:
    async with planner(HUNG, wait_s=0.01) as made:
        turn = made.begin()
        assert await turn.settle(decision(turn, KEY)) is None
        assert await turn.settle(decision(turn, KEYS[0])) is None  # the round's time is over


async def test_a_decision_without_a_fallback_is_skipped() -> None:
    async with planner(HUNG, wait_s=0.01) as made:
        turn = made.begin(has_fallback=False)
        with pytest.raises(PlanNotReady):
            await turn.settle(decision(turn, KEY))


@pytest.mark.parametrize(("code", "build_limit_s"), [(BROKEN, 60.0), (HUNG, 0.01)])
async def test_a_process_that_fails_is_replaced(code: str, build_limit_s: float) -> None:
    async with planner(code, build_limit_s=build_limit_s) as made:
        turn = made.begin()
        assert await turn.settle(decision(turn, KEY)) is None
        made._command, made._build_limit_s, made._monotonic = COMMAND, 60.0, lambda: float("inf")
        turn = made.begin()
        assert await turn.settle(decision(turn, KEY)) == costs(SpotPlan(KEY))


async def test_a_process_killed_while_idle_costs_no_decision_its_plan() -> None:
    async with planner() as made:
        for key in KEYS[:2]:
            turn = made.begin(has_fallback=False)
            assert await turn.settle(decision(turn, key)) == costs(SpotPlan(key))
            assert made._process is not None
            os.kill(made._process.pid, signal.SIGKILL)
        assert made._process is not None
        await made._process.wait()
        turn = made.begin(has_fallback=False)
        assert await turn.settle(decision(turn, KEYS[2])) == costs(SpotPlan(KEYS[2]))


async def test_a_process_that_cannot_start_is_logged_and_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "starts"
    async with planner(f"open({str(log)!r}, 'a').write('x'); raise SystemExit('no module')") as made:
        made._monotonic = lambda: 1000.0
        for key in KEYS[:4]:
            turn = made.begin()
            assert await turn.settle(decision(turn, key)) is None
    assert len(log.read_text()) == 2
    assert [record.getMessage().endswith(": no module") for record in caplog.records].count(True) == 1


async def test_the_process_imports_from_a_relative_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("from broker.runtime.spot_plan_process import serve")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(".")
    monkeypatch.setenv("PYTHONPATH", ".")
    async with planner("import sys, only_here; only_here.serve(sys.stdin.buffer, sys.stdout.buffer)") as made:
        turn = made.begin()
        assert await turn.settle(decision(turn, KEY)) == costs(SpotPlan(KEY))


async def test_builds_that_wait_are_limited() -> None:
    keys = [replace(KEY, price=0.001 * number) for number in range(300)]
    async with planner(HUNG) as made:
        builds = [made.request(key) for key in keys]
        assert 0 < sum(build is None for build in builds) < len(keys)
        assert made.request(keys[0]) is builds[0]


async def test_close_ends_the_process_and_all_waits() -> None:
    async with planner(HUNG) as made:
        turn = made.begin()
        pid = (await made._start()).pid
        waiting = asyncio.ensure_future(turn.settle(decision(turn, KEY)))
        await asyncio.sleep(0)
        await made.close()
        assert await waiting is None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_plan_that_the_cache_drops_stays_for_its_round() -> None:
    async with planner() as made:
        turn = made.begin()
        await turn.settle(decision(turn, KEY))
        made.cache = SpotPlanCache()
        assert turn(KEY) is not None


async def test_plans_without_a_planner_are_built_in_place() -> None:
    turn = InlinePlans().begin()
    assert await turn.settle(decision(turn, KEY)) == costs(SpotPlan(KEY))


def test_the_process_answers_keys_in_order() -> None:
    answers = BytesIO()
    serve([b'{"horizon_min": 60, "slack_min": 30, "changeover_min": 6, "price": 0.3, "fall": 0, "rise": 0}'], answers)
    (length,) = LENGTH.unpack(answers.getvalue()[: LENGTH.size])
    assert len(answers.getvalue()) == LENGTH.size + length
    assert plans.no_plan(KEY) is None
