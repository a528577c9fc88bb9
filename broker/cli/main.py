"""The typer application: every command by its name."""

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from broker.cli.commands import channels as channel
from broker.cli.commands import policies as policy
from broker.cli.commands import secrets as secret
from broker.cli.commands import slack, spending, tenancy
from broker.cli.commands.catalog import gpus, models
from broker.cli.commands.estimate import estimate
from broker.cli.core.exit_codes import MEANINGS
from broker.cli.core.usage_errors import Root
from broker.cli.jobs import jobs, ssh, submit
from broker.cli.jobs.delete_data import rm
from broker.cli.operator import blob_store, clouds, daemon, master_key
from broker.cli.operator import launchers as launcher
from broker.cli.operator.sweep import sweep

CODES = "; ".join(f"{int(code)}: {text}" for code, text in MEANINGS.items())
app = typer.Typer(
    name="gpubroker",
    cls=Root,
    help="Run training jobs on the cheapest suitable cloud GPUs, and never spend more than the job's cap.",
    epilog=f"Exit codes: {CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tokens = typer.Typer(help="Access tokens for users and programs.", no_args_is_help=True)
teams = typer.Typer(help="Teams: users who share jobs and budgets.", no_args_is_help=True)
secrets = typer.Typer(help="Secrets, which jobs receive as environment variables.", no_args_is_help=True)
slacks = typer.Typer(help="Link Slack users.", no_args_is_help=True)
channels = typer.Typer(help="Notification channels.", no_args_is_help=True)
notify = typer.Typer(help="Test notifications.", no_args_is_help=True)
policies = typer.Typer(help="Policies: spending limits of teams, users and the installation.", no_args_is_help=True)
blobs = typer.Typer(help="The blob store, which holds checkpoints, results and logs.", no_args_is_help=True)
keys = typer.Typer(help="The master key, which encrypts secrets.", no_args_is_help=True)
rented = typer.Typer(help="Rented clouds: the environment of SkyPilot, which launches machines.", no_args_is_help=True)
launchers = typer.Typer(help="Launchers: the processes that create machines. Report a lost one.", no_args_is_help=True)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(installed_version("gpubroker"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


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
app.command("spend")(spending.spend)
app.command("reconcile")(spending.reconcile_file)
app.command("ssh")(ssh.ssh)
app.command("exec")(ssh.execute)
app.command("sweep")(sweep)
app.command("doctor")(daemon.doctor)
tokens.command("new")(tenancy.token_new)
tokens.command("ls")(tenancy.token_ls)
tokens.command("rm")(tenancy.token_rm)
teams.command("new")(tenancy.team_new)
teams.command("ls")(tenancy.team_ls)
teams.command("rm")(tenancy.team_rm)
app.command("audit")(tenancy.audit)
secrets.command("set")(secret.secret_set)
secrets.command("ls")(secret.secret_ls)
secrets.command("rm")(secret.secret_rm)
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
keys.command("adopt")(master_key.adopt)
rented.command("install")(clouds.install)
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
app.add_typer(rented, name="clouds")
app.add_typer(launchers, name="launcher")
