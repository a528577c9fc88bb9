"""`gpubroker key adopt`: another master key in the place of one that is lost."""

import os
from typing import Annotated

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.confirm import confirm
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.operator.local_store import Config, Home, Named, opened


@command
async def adopt(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    installation: Named = None,
    home: Home = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Let the home's master key, or $GPUBROKER_MASTER_KEY, take the place of the one that this database's secrets are
    sealed by, which is lost: secrets, channels and Slack's apps must be set again. Stop every daemon first.
    """
    from broker.runtime.secret_box import MASTER_KEY_FILE, MASTER_KEY_VARIABLE, SecretBox, master_key

    out = Output(as_json=as_json)
    async with opened(home, config, installation) as it:
        known = await it.store.master_key(None)
        if known and it.lives:
            raise BadInput(f"a daemon runs on {it.settings.home}; stop it first")
        path = it.settings.home / MASTER_KEY_FILE
        there = bool(os.environ.get(MASTER_KEY_VARIABLE)) or path.exists()  # none is made before the answer
        adopted = not there or SecretBox(master_key(path, os.environ)).mark != known
        if adopted:
            asked = "Is the old master key lost, and every daemon stopped? Nothing that it sealed can be opened then"
            confirm(out, asked, yes=yes, to="adopt it", else_="nothing was changed")
            await it.store.adopt_master_key(SecretBox(master_key(path, os.environ)).mark)
    out.document({"adopted": adopted})
    now = "from now on: set secrets, channels and Slack's apps again" if adopted else "already"
    out.say(f"this database's secrets are sealed by this master key {now}")
