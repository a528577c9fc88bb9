"""`gpubroker clouds install`: SkyPilot's own environment, on which machines of rented clouds are launched."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import ServerProblem
from broker.cli.core.output import Output
from broker.cli.operator.local_store import Home


@command
async def install(
    venv: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Virtual environment. Default: providers/skypilot/venv in the home."),
    ] = None,
    find_links: Annotated[
        list[str] | None,
        typer.Option("--find-links", metavar="DIR", help="Folder or page with all wheels; asks no index. Repeatable."),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Install SkyPilot and gpubroker's plugin into an environment of their own, or bring it up to date.

    Restart the daemon afterwards.
    """
    from broker.domain.errors import Rejected
    from broker.paths import default_home
    from broker.runtime.private_files import private_folder
    from providers.skypilot import environment
    from providers.skypilot.plugin.shared import SKY_VERSION

    out = Output(as_json=as_json)
    if venv is None:
        venv = environment.venv_of_home((home or default_home()) / "providers")
        private_folder(venv.parent)
    try:
        python = await asyncio.to_thread(environment.install, venv.absolute(), find_links=find_links or ())
    except Rejected as e:
        raise ServerProblem(str(e)) from None
    out.document({"python": str(python), "skypilot": SKY_VERSION})
    out.print(f"SkyPilot {SKY_VERSION} is in {venv}; restart the daemon if it runs")
