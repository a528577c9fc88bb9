"""Set-up of a script job: packages and commands, on each machine before the program starts."""

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.agent.base.prepare import UnusableInput
from trainer.agent.lifecycle import AttemptLifecycle
from trainer.agent.process import package_environment
from trainer.agent.process.child import Child, kill_descendants
from trainer.contract.documents import Outcome
from trainer.contract.script import ScriptConfig

SHELL = ("bash", "-e", "-o", "pipefail", "-c")
PYTHON = re.compile(r"python[0-9.]*")
FIRST_CHARACTERS = 100
"""Characters of a command that the log line before its output shows."""
ELSEWHERE = {75: Outcome.INFRASTRUCTURE}
"""Exit codes after which the job continues on another machine, as for the program itself."""


@dataclass(frozen=True, kw_only=True)
class SetupStep:
    """One command of the set-up."""

    name: str
    """Name in messages, such as `command 2`."""
    place: str
    """Rest of the name in the log, such as ` of 3`."""
    shown: str
    """Text of the command, for the log."""
    argv: Sequence[str]
    changes: Mapping[str, str] = field(default_factory=dict)
    """Variables for the steps after this one and for the program."""


class ProgramSetup:
    """Set-up of one attempt on one machine."""

    def __init__(self, lifecycle: AttemptLifecycle, script: ScriptConfig, folder: Path, env: Mapping[str, str]) -> None:
        """`folder`: the unpacked code, in which all commands run. `env`: variables of the program."""
        self._lifecycle, self._script, self._folder, self._env = lifecycle, script, folder, dict(env)
        self._state = lifecycle.state

    async def run(self) -> dict[str, str]:
        """Install the packages, run all commands within the time limit, and return the program's variables.

        Raises: UnusableInput if a command fails, the time is over, or the attempt must end.
        """
        state, deadline = self._state, time.monotonic() + self._script.setup_timeout_s
        for step in self._steps():
            state.phase, state.message = "setup", f"setup: {step.name}"
            self._lifecycle.log_line(f"setup: {step.name}{step.place}: {_first_line(step.shown)}")
            self._lifecycle.heartbeats.now()
            await self._run(step, deadline - time.monotonic())
            self._env |= step.changes
        state.phase, state.message = "loading", ""
        return self._env

    def _steps(self) -> Iterator[SetupStep]:
        if self._script.requirements is not None:
            yield self._packages(self._script.requirements)
        place = f" of {len(self._script.setup)}"
        for number, command in enumerate(self._script.setup, 1):
            yield SetupStep(name=f"command {number}", place=place, shown=command, argv=(*SHELL, command))

    def _packages(self, requirements: str) -> SetupStep:
        """Return the step that installs the requirements. Raises: UnusableInput if the file is missing."""
        if not (self._folder / requirements).is_file():
            raise UnusableInput(Outcome.USER_ERROR, f"script.requirements: the code has no file {requirements}")
        folder = self._folder.with_name(f"{self._folder.name}-packages")
        python = program_python(self._script.command, self._env)
        return SetupStep(
            name=requirements,
            place="",
            shown=f"installs into an environment of {python}",
            argv=(python, "-I", package_environment.__file__, str(folder), requirements),
            changes={
                "PATH": os.pathsep.join([str(folder / "bin"), self._env.get("PATH", os.defpath)]),
                "VIRTUAL_ENV": str(folder),
            },
        )

    async def _run(self, step: SetupStep, left_s: float) -> None:
        """Run one command and end the processes that it leaves."""
        lifecycle, state = self._lifecycle, self._state
        lifecycle.log.last = ""
        child = await Child.start(step.argv, self._env, self._folder)
        output = asyncio.ensure_future(child.pump(lifecycle.log.feed))
        exited = asyncio.ensure_future(child.wait())
        end_requested = asyncio.ensure_future(state.ending_asked.wait())
        await asyncio.wait({exited, end_requested}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        in_time = exited.done()
        end_requested.cancel()
        if not in_time:
            child.kill(lifecycle.trackers.pids)
        code = await exited
        kill_descendants(lifecycle.trackers.pids)
        await output
        lifecycle.log.end()
        if state.ending is not None:
            raise UnusableInput(state.ending.outcome, f"{state.ending.reason}; it was still in its set-up")
        if not in_time:
            limit_s = self._script.setup_timeout_s
            raise UnusableInput(
                Outcome.USER_ERROR,
                f"setup: {step.name} was ended after {limit_s} s for the whole set-up{self._last_line()}; "
                "raise script.setup_timeout_s",
            )
        if code and child.killed_for_memory:
            raise UnusableInput(Outcome.OOM, f"setup: {step.name}: the kernel killed it for memory")
        if code:
            outcome = ELSEWHERE.get(code, Outcome.USER_ERROR)
            raise UnusableInput(outcome, f"setup: {step.name} {_how(code)}{self._last_line()}")

    def _last_line(self) -> str:
        last = self._lifecycle.log.last
        return f"; its last line: {last}" if last else ""


def program_python(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the Python that runs the program: the one that its command names, otherwise the first on the PATH."""
    own = [command[0]] if PYTHON.fullmatch(Path(command[0]).name) else []
    paths = (shutil.which(name, path=env.get("PATH", os.defpath)) for name in (*own, "python3", "python"))
    return next((path for path in paths if path is not None), sys.executable)


def _first_line(text: str) -> str:
    first, *rest = text.strip().splitlines() or [""]
    is_cut = bool(rest) or len(first) > FIRST_CHARACTERS
    return first[:FIRST_CHARACTERS] + (" …" if is_cut else "")


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    name = next((number.name for number in signal.Signals if number == -code), str(-code))
    return f"was ended by signal {name}"
