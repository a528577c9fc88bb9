"""`gpubroker blobs adopt`: another blob store in the place of one that is lost."""

from typing import Annotated

import typer

from broker.cli.asking import agree
from broker.cli.exits import BadInput
from broker.cli.home import Config, Home, Named, opened
from broker.cli.output import Output
from broker.cli.shell import Json, command


@command
async def adopt(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    installation: Named = None,
    home: Home = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Let the configured blob store take the place of the one that this database's jobs lie in, which is lost with
    their checkpoints. Stop every daemon first."""
    from broker.blobs import ObstoreBlobs
    from broker.homes import mark_of

    out = Output(as_json=as_json)
    async with opened(home, config, installation) as it:
        url = it.settings.blobs_url
        blobs = ObstoreBlobs.open(url, it.installation, options=it.settings.blob_options)
        mark = await mark_of(blobs)
        adopted = await it.store.blob_store(mark) != mark
        if adopted:
            if it.lives:
                raise BadInput(f"a daemon runs on {it.settings.home}, with another blob store; stop it first")
            asked = "Is the old blob store lost, and every daemon stopped?"
            agree(out, asked, yes=yes, to="adopt it", else_="nothing was changed")
            await it.store.adopt_blob_store(mark)
    out.document({"url": url, "adopted": adopted})
    now = "from now on" if adopted else "already"
    out.say(f"{url} is {now} the blob store of this database's jobs")
