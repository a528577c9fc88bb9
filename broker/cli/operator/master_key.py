"""`gpubroker key adopt`: replace a lost master key."""

import os
from typing import Annotated

import typer

from broker.cli.core.command import Json, command, confirm
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
    """Replace a lost master key with the home's key or $GPUBROKER_MASTER_KEY. Stop every daemon first.

    Secrets, channels and Slack apps must be set again.
    """
    from broker.runtime.secret_box import MASTER_KEY_FILE, MASTER_KEY_VARIABLE, SecretBox, master_key

    out = Output(as_json=as_json)
    async with opened(home, config, installation) as stores:
        stored_key = await stores.store.master_key(None)
        if stored_key and stores.lives:
            raise BadInput(f"a daemon runs on {stores.settings.home}; stop it first")
        path = stores.settings.home / MASTER_KEY_FILE
        exists = bool(os.environ.get(MASTER_KEY_VARIABLE)) or path.exists()  # create no key before the answer
        adopted = not exists or SecretBox(master_key(path, os.environ)).mark != stored_key
        if adopted:
            question = "Is the old master key lost, and is every daemon stopped? Its secrets can no longer be decrypted"
            confirm(out, question, yes=yes, verb="adopt it", refusal="nothing was changed")
            await stores.store.adopt_master_key(SecretBox(master_key(path, os.environ)).mark)
    out.document({"adopted": adopted})
    state = "now uses this master key; set secrets, channels and Slack apps again" if adopted else "already uses it"
    out.print(f"this database {state}")
