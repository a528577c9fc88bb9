"""`gpubroker blobs adopt`: replace a lost blob store."""

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
    """Replace a lost blob store with the configured one. Its checkpoints are lost too. Stop every daemon first."""
    from broker.blobs import ObstoreBlobs
    from broker.daemon.installation import mark_of

    out = Output(as_json=as_json)
    async with opened(home, config, installation) as stores:
        url = stores.settings.blobs_url
        blobs = ObstoreBlobs.open(url, stores.installation, options=stores.settings.blob_options)
        mark = await mark_of(blobs)
        adopted = await stores.store.blob_store(mark) != mark
        if adopted:
            if stores.lives:
                raise BadInput(f"a daemon runs on {stores.settings.home}, with another blob store; stop it first")
            question = "Is the old blob store lost, and is every daemon stopped?"
            confirm(out, question, yes=yes, verb="adopt it", refusal="nothing was changed")
            await stores.store.adopt_blob_store(mark)
    out.document({"url": url, "adopted": adopted})
    state = "now" if adopted else "already"
    out.print(f"{url} is {state} the blob store of this database")
