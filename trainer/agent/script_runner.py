"""Runner of script jobs: the user's own program, whose checkpoint folder the agent saves."""

import asyncio
import os
import secrets
from pathlib import Path

from trainer.agent.base import prepare
from trainer.agent.base.background import background
from trainer.agent.conclusion import AttemptEnd
from trainer.agent.lifecycle import AttemptLifecycle
from trainer.agent.process.child import Child, child_environment
from trainer.agent.program_setup import ProgramSetup
from trainer.agent.upload.save_interval import SaveInterval
from trainer.agent.upload.script_snapshots import ScriptTree
from trainer.checkpoint.protocol import Origin
from trainer.contract.documents import AttemptSpec
from trainer.contract.script import ScriptConfig


class ScriptRunner:
    """Script job of one attempt."""

    def __init__(self, lifecycle: AttemptLifecycle, spec: AttemptSpec, script: ScriptConfig) -> None:
        self._lifecycle, self._spec, self._script = lifecycle, spec, script
        self._env, self._state = lifecycle.env, lifecycle.state
        self._origin = Origin(job=spec.job, attempt=spec.attempt, kind="script")
        self._tree = lifecycle.env.workdir / "checkpoint"
        """Folder in which the program saves what a later start needs."""

    async def run(self) -> AttemptEnd:
        """Prepare the program, and run it until its end. Raises: UnusableInput, ObjectStoreError."""
        spec, lifecycle = self._spec, self._lifecycle
        self._state.phase = "loading"
        folder = await self._fetch_code()
        variables = await self._variables()
        await lifecycle.restore(spec, self._origin, self._tree)
        self._tree.mkdir(exist_ok=True)
        env = child_environment(os.environ, variables, lifecycle.secrets)
        env = await ProgramSetup(lifecycle, self._script, folder, env).run()
        interval = lifecycle.save_interval(spec)
        snapshots = self._snapshots(interval)
        saves = self._env.node == 0  # checkpoints of several machines would replace each other
        if not saves:
            lifecycle.log_line(
                "what lies in this machine's checkpoint folder is not saved: the first machine's alone is"
            )
        child = await Child.start(self._script.command, {**env, **lifecycle.secrets}, folder)
        self._state.phase = "training"
        async with (
            lifecycle.uploading(spec, self._origin, interval) as saver,
            background(*([snapshots.run()] if saves else [])),
        ):
            code = await lifecycle.supervise(child, saver, ask=child.terminate)
        complete, ending = True, self._state.ending
        if saves and not (child.stopped and ending and not ending.save):
            complete = await snapshots.last(complete=code == 0 and not child.asked)
        return await lifecycle.conclude(child, code, saver, script=True, complete=complete)

    async def _fetch_code(self) -> Path:
        """Return a new folder with the user's code; it is empty for a job without code."""
        spec, workdir = self._spec, self._env.workdir
        folder = workdir / f"code-{secrets.token_hex(4)}"
        if spec.code is not None:
            fetch = prepare.fetch(self._lifecycle.objects, spec.code, workdir / "code.tar")
            await asyncio.to_thread(prepare.unpack, await self._lifecycle.fetch(fetch), folder)
        folder.mkdir(exist_ok=True)
        return folder

    async def _variables(self) -> dict[str, str]:
        """Fetch the data and return the program's variables other than its secrets."""
        spec = self._spec
        variables = {**spec.env, "GPUBROKER_CHECKPOINT_DIR": str(self._tree)}
        if spec.data is not None:
            data = prepare.fetch(self._lifecycle.objects, spec.data, self._env.workdir / "data")
            variables["GPUBROKER_DATA"] = str(await self._lifecycle.fetch(data))
        return variables

    def _snapshots(self, interval: SaveInterval) -> ScriptTree:
        return ScriptTree(
            self._tree,
            self._state.run,
            every_s=lambda: interval.every_s,
            step=self._state.resumed_from or 0,
            report=self._lifecycle.report,
        )
