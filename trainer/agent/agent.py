"""Agent of one machine: runs one attempt from the first heartbeat to `final.json`."""

import asyncio
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.agent import preemption_notice
from trainer.agent.base import prepare
from trainer.agent.base.background import background
from trainer.agent.base.environment import Environment
from trainer.agent.base.prepare import UnusableInput
from trainer.agent.conclusion import AttemptEnd
from trainer.agent.desired_state import DesiredStateWatcher
from trainer.agent.lifecycle import AttemptLifecycle
from trainer.agent.process.child import kill_descendants
from trainer.agent.process.host_check import HostNotUsable
from trainer.agent.script_runner import ScriptRunner
from trainer.agent.train_runner import TrainRunner
from trainer.contract import object_keys
from trainer.contract.documents import AttemptSpec, Outcome
from trainer.core.errors import EXIT
from trainer.core.parent_death import adopt_orphans, make_undumpable
from trainer.objectstore.objects import ObjectStoreError


class Agent:
    """Agent of one attempt; `echo` receives every redacted log line."""

    def __init__(
        self,
        env: Environment,
        echo: Callable[[str], None] | None = None,
        *,
        folder: Path | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Create an agent.

        `folder` outlives the attempt and holds files of trackers. `secrets` are used when no grant delivers
        them.
        """
        self._env = env
        self._lifecycle = AttemptLifecycle(env, echo, folder, secrets or {})
        self._state = self._lifecycle.state

    async def run(self) -> Outcome:
        """Run the attempt to its end, write `final.json`, and return the outcome."""
        self._drain_on_signals()
        adopt_orphans()
        self._state.run.make()
        lifecycle = self._lifecycle
        code: int | None = None
        async with background(lifecycle.heartbeats.run(), lifecycle.shipper.run()):
            try:
                outcome, message, code = await self._attempt()
            except UnusableInput as e:
                outcome, message = e.outcome, str(e)
                self._state.bad_host = isinstance(e, HostNotUsable)
            except ObjectStoreError as e:
                outcome, message = Outcome.INFRASTRUCTURE, str(e)
            except Exception as e:  # the broker must not wait for a machine on which nothing runs
                lifecycle.log.feed(traceback.format_exc().encode())
                outcome, message = Outcome.INFRASTRUCTURE, f"the agent failed: {type(e).__name__}: {e}"
            finally:
                kill_descendants(lifecycle.trackers.pids)
            return await lifecycle.finish(outcome, lifecycle.log.redact(message), code)

    def _drain_on_signals(self) -> None:
        """Install handlers of SIGTERM, SIGINT and SIGHUP that save a checkpoint and stop."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._state.end, Outcome.DRAINED, "asked by a signal")

    async def _attempt(self) -> AttemptEnd:
        """Read the spec and run its job, while following `desired.json` and preemption notices."""
        lifecycle = self._lifecycle
        await prepare.retry_while_unreachable(lifecycle.renew, prepare.RETRY_FOR_S)
        spec = await prepare.read_spec(lifecycle.objects, self._env.attempt)
        self._state.spec, self._state.limits = spec, spec.limits
        if await lifecycle.objects.read(object_keys.final(self._env.attempt)) is not None:
            raise UnusableInput(Outcome.INFRASTRUCTURE, "this attempt has ended already; a new one needs a new id")
        if missing := [name for name in spec.secrets if name not in lifecycle.secrets]:
            raise UnusableInput(Outcome.USER_ERROR, f"secret {missing[0]!r} has no value; set it and submit again")
        watcher = DesiredStateWatcher(lifecycle.objects, self._state, lifecycle.renew, lifecycle.log_line)
        watching = [watcher.run()]
        if endpoint := preemption_notice.endpoint():
            hurry, log = lifecycle.heartbeats.now, lifecycle.log_line
            watching.append(preemption_notice.watching(endpoint, self._state, log=log, hurry=hurry))
        async with background(*watching):
            end = await self._runner(spec).run()
            # During this wait the watcher still follows desired.json.
            await lifecycle.final_report.await_first_machine(end.outcome, end.message, lifecycle.log_line)
            return end

    def _runner(self, spec: AttemptSpec) -> TrainRunner | ScriptRunner:
        if spec.train is not None:
            return TrainRunner(self._lifecycle, spec, spec.train)
        assert spec.script is not None
        return ScriptRunner(self._lifecycle, spec, spec.script)


def main(env: Environment) -> int:
    """Run the agent and return its exit code."""
    # Not on local machines: the broker finds their processes by the environment, which must stay readable.
    if "GPUBROKER_WAY" in os.environ:
        make_undumpable()
    return int(EXIT[asyncio.run(Agent(env).run())])
