"""The commands by name."""

from importlib.metadata import version as installed
from typing import Annotated

import typer

from broker.cli.commands import (
    channels as channel,
)
from broker.cli.commands import (
    policies as policy,
)
from broker.cli.commands import (
    secrets as admin,
)
from broker.cli.commands import (
    slack,
    tenancy,
)
from broker.cli.commands import (
    spending as spend,
)
from broker.cli.commands.catalog import gpus, models
from broker.cli.commands.estimate import estimate
from broker.cli.core.exit_codes import MEANINGS
from broker.cli.core.usage_errors import Root
from broker.cli.jobs import jobs, submit
from broker.cli.jobs import ssh as remote
from broker.cli.jobs.delete_data import rm
from broker.cli.operator import blob_store, daemon
from broker.cli.operator import launchers as launcher
from broker.cli.operator import master_key as key
from broker.cli.operator.sweep import sweep

CODES = "; ".join(f"{int(code)}: {text}" for code, text in MEANINGS.items())
app = typer.Typer(
    name="gpubroker",
    cls=Root,
    help="Buys the cheapest GPU capacity that finishes a training job, and never spends past its cap.",
    epilog=f"Exit codes: {CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tokens = typer.Typer(help="Tokens of people and programs.", no_args_is_help=True)
teams = typer.Typer(help="Teams, which share jobs and budgets.", no_args_is_help=True)
secrets = typer.Typer(help="Secrets that jobs see as environment variables.", no_args_is_help=True)
slacks = typer.Typer(help="People of Slack.", no_args_is_help=True)
channels = typer.Typer(help="Where people and programs are told.", no_args_is_help=True)
notify = typer.Typer(help="Telling people.", no_args_is_help=True)
policies = typer.Typer(help="What teams, users and the installation may spend.", no_args_is_help=True)
blobs = typer.Typer(help="The blob store.", no_args_is_help=True)
keys = typer.Typer(help="The master key, which seals secrets.", no_args_is_help=True)
launchers = typer.Typer(help="What creates machines, and may be lost with its computer.", no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed("gpubroker"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Takes the options that belong to no command."""


app.command("serve")(daemon.serve)
app.command("login")(daemon.login)
app.command("init")(daemon.init)
app.command("quote")(submit.quote)
app.command("estimate")(estimate)
app.command("models")(models)
app.command("gpus")(gpus)
app.command("submit")(submit.submit)
app.command("offers")(submit.offers)
app.command("ls")(jobs.ls)
app.command("get")(jobs.get)
app.command("explain")(jobs.explain)
app.command("watch")(jobs.watch_job)
app.command("logs")(jobs.logs)
app.command("events")(jobs.events)
app.command("cancel")(jobs.cancel)
app.command("cap")(jobs.cap)
app.command("retry")(jobs.retry)
app.command("artifacts")(jobs.artifacts)
app.command("rm")(rm)
app.command("approve")(policy.approve)
app.command("refuse")(policy.refuse)
app.command("budget")(policy.budget)
app.command("spend")(spend.spend)
app.command("reconcile")(spend.reconcile_file)
app.command("ssh")(remote.ssh)
app.command("exec")(remote.execute)
app.command("sweep")(sweep)
app.command("doctor")(daemon.doctor)
tokens.command("new")(tenancy.token_new)
tokens.command("ls")(tenancy.token_ls)
tokens.command("rm")(tenancy.token_rm)
teams.command("new")(tenancy.team_new)
teams.command("ls")(tenancy.team_ls)
teams.command("rm")(tenancy.team_rm)
app.command("audit")(tenancy.audit)
secrets.command("set")(admin.secret_set)
secrets.command("ls")(admin.secret_ls)
secrets.command("rm")(admin.secret_rm)
channels.command("add")(channel.add)
channels.command("ls")(channel.ls)
channels.command("show")(channel.show)
channels.command("test")(channel.try_out)
channels.command("events")(channel.events)
channels.command("rotate")(channel.rotate)
channels.command("enable")(channel.enable)
channels.command("disable")(channel.disable)
channels.command("remove")(channel.remove)
notify.command("test")(channel.try_out)
policies.command("apply")(policy.apply)
policies.command("ls")(policy.ls)
policies.command("show")(policy.show)
policies.command("history")(policy.history)
policies.command("delete")(policy.delete)
policies.command("dry-run")(policy.dry_run)
blobs.command("init")(daemon.blobs_init)
blobs.command("adopt")(blob_store.adopt)
keys.command("adopt")(key.adopt)
launchers.command("ls")(launcher.ls)
launchers.command("lost")(launcher.lost)
slacks.command("link")(slack.link)
slacks.command("ls")(slack.links)
slacks.command("unlink")(slack.unlink)
app.add_typer(tokens, name="token")
app.add_typer(teams, name="team")
app.add_typer(secrets, name="secret")
app.add_typer(slacks, name="slack")
app.add_typer(channels, name="channel")
app.add_typer(notify, name="notify")
app.add_typer(policies, name="policy")
app.add_typer(blobs, name="blobs")
app.add_typer(keys, name="key")
app.add_typer(launchers, name="launcher")
