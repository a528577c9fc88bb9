"""The typer application: every command by its name, with its function, which is imported when the command runs."""

from collections.abc import Mapping
from typing import Annotated

import typer

from broker.cli.core.exit_codes import MEANINGS
from broker.cli.core.lazy_commands import Entry, LazyGroup

COMMANDS: Mapping[str, Entry] = {
    "serve": Entry(
        "operator.daemon:serve",
        "Run the daemon until SIGINT or SIGTERM. Running machines keep training; the next start reattaches to them.",
    ),
    "login": Entry(
        "commands.setup:login",
        "Store the URL and token of a daemon for this user. Without URL, show which daemon is in use.",
    ),
    "init": Entry("commands.setup:init", "Write a short spec to start from; `-` writes it to stdout."),
    "schema": Entry("commands.setup:schema", "Print the JSON Schema of a job's spec, for editors and other programs."),
    "convert": Entry(
        "commands.convert:convert",
        "Convert a SkyPilot or dstack task into a spec, and list on stderr what has no counterpart.",
    ),
    "quote": Entry(
        "jobs.submit:quote",
        "Check a spec and its data, and price the job on every offer. Nothing is created or bought.",
    ),
    "estimate": Entry(
        "commands.estimate:estimate",
        "Estimate GPU memory and throughput of a fine-tune. Works offline: needs no daemon, GPU or weights.",
    ),
    "simulate": Entry(
        "commands.simulate:simulate",
        "Run the broker's spot decisions over traces and compare them with the cheapest run. Needs no daemon.",
    ),
    "models": Entry(
        "commands.catalog:models", "List the models of the bundled catalogue, which the broker can size offline."
    ),
    "gpus": Entry(
        "commands.catalog:gpus", "List the GPUs that estimates cover: memory, arithmetic speed and interconnect."
    ),
    "submit": Entry(
        "jobs.submit:submit",
        "Check, quote, confirm and submit a job, then watch it until it ends. Ctrl-C leaves the job running.",
    ),
    "offers": Entry(
        {"": "commands.market:offers", "export": "commands.market:export"},
        "List current offers, cheapest first, with the age and the source of each price.",
    ),
    "web": Entry("commands.web:web", "Open the web pages in a browser, on the daemon's own machine signed in."),
    "ls": Entry("jobs.listing:ls", "List your team's jobs, newest first."),
    "get": Entry("jobs.jobs:get", "Show a job: state, progress, attempts and cost."),
    "explain": Entry(
        "jobs.jobs:explain",
        "Show why a job waited, moved or stayed, and every offer at a purchase, kept or dropped, with the reason.",
    ),
    "watch": Entry(
        "jobs.jobs:watch_job",
        "Follow a job until it ends: events, progress, then a summary. Ctrl-C leaves the job running.",
    ),
    "logs": Entry(
        "jobs.logs:logs",
        "Show the log of a job, escaped on a terminal; --follow --json writes one document per line.",
    ),
    "metrics": Entry(
        "jobs.metrics:metrics", "Show the steps of a job over all attempts: loss, learning rate and tokens a second."
    ),
    "compare": Entry(
        "jobs.compare:compare",
        "Compare up to 8 runs: results, money, time, and the settings in which their specs differ.",
    ),
    "events": Entry("jobs.jobs:events", "Show the events of a job; --follow --json writes one document per line."),
    "cancel": Entry("jobs.jobs:cancel", "Cancel a job: it saves a checkpoint, then its machines are destroyed."),
    "cap": Entry("jobs.jobs:cap", "Raise a job's cap; a capped job resumes."),
    "retry": Entry("jobs.jobs:retry", "Run an ended job again, as a new job that is linked to the old one."),
    "artifacts": Entry(
        "jobs.jobs:artifacts",
        "List or download a job's files: the adapter or model, metrics, samples and the loss curve.",
    ),
    "rm": Entry(
        "jobs.delete_data:rm",
        "Delete a job's results, checkpoints, logs and data set copy. Shows their cost and asks first.",
    ),
    "clone": Entry("jobs.clone:clone", "Write the spec of a job to a file, to change it and submit it again."),
    "approve": Entry("commands.policies:approve", "Approve a job that awaits approval, or a higher cap for it."),
    "refuse": Entry("commands.policies:refuse", "Refuse and cancel a job that awaits approval."),
    "budget": Entry(
        "commands.policies:budget", "Show the use of every budget: spent and reserved dollars, GPUs and jobs."
    ),
    "spend": Entry(
        "commands.spending:spend",
        "Show spending, and the savings against other offers. Work that was lost counts as cost.",
    ),
    "calibration": Entry(
        "commands.calibration:calibration",
        "Show how many finished jobs stayed within the P90 of their quote, and the median error, by group.",
    ),
    "reconcile": Entry(
        "commands.spending:reconcile_file",
        "Compare a cloud's invoice with the ledger, machine by machine. Exit code 1 if they differ.",
    ),
    "ssh": Entry(
        "jobs.ssh:ssh", "Open a shell on a job's machine while training runs. Exits with the shell's exit code."
    ),
    "exec": Entry(
        "jobs.ssh:execute", "Run a program on a job's machine while training runs: `gpubroker exec JOB -- nvidia-smi`."
    ),
    "sweep": Entry(
        "operator.sweep:sweep",
        "List this installation's machines in every cloud, and mark orphaned machines. Needs no daemon.",
    ),
    "doctor": Entry("operator.doctor:doctor", "Check the setup and suggest fixes."),
    "audit": Entry(
        "commands.tenancy:audit",
        "Show the audit log of your team, or of all teams as an admin. The newest entry is last.",
    ),
    "token": Entry(
        {"new": "commands.tenancy:token_new", "ls": "commands.tenancy:token_ls", "rm": "commands.tenancy:token_rm"},
        "Access tokens for users and programs.",
    ),
    "team": Entry(
        {"new": "commands.tenancy:team_new", "ls": "commands.tenancy:team_ls", "rm": "commands.tenancy:team_rm"},
        "Teams: users who share jobs and budgets.",
    ),
    "secret": Entry(
        {"set": "commands.secrets:secret_set", "ls": "commands.secrets:secret_ls", "rm": "commands.secrets:secret_rm"},
        "Secrets, which jobs receive as environment variables.",
    ),
    "slack": Entry(
        {"link": "commands.slack:link", "ls": "commands.slack:links", "unlink": "commands.slack:unlink"},
        "Link Slack users.",
    ),
    "channel": Entry(
        {
            "add": "commands.channels:add",
            "ls": "commands.channels:ls",
            "show": "commands.channels:show",
            "test": "commands.channels:try_out",
            "events": "commands.channels:events",
            "rotate": "commands.channels:rotate",
            "enable": "commands.channels:enable",
            "disable": "commands.channels:disable",
            "remove": "commands.channels:remove",
        },
        "Notification channels.",
    ),
    "notify": Entry({"test": "commands.channels:try_out"}, "Test notifications."),
    "policy": Entry(
        {
            "apply": "commands.policies:apply",
            "ls": "commands.policies:ls",
            "show": "commands.policies:show",
            "history": "commands.policies:history",
            "delete": "commands.policies:delete",
            "dry-run": "commands.policies:dry_run",
        },
        "Policies: spending limits of teams, users and the installation.",
    ),
    "blobs": Entry(
        {"init": "operator.daemon:blobs_init", "adopt": "operator.blob_store:adopt"},
        "The blob store, which holds checkpoints, results and logs.",
    ),
    "key": Entry({"adopt": "operator.master_key:adopt"}, "The master key, which encrypts secrets."),
    "clouds": Entry(
        {"install": "operator.clouds:install"}, "Rented clouds: the environment of SkyPilot, which launches machines."
    ),
    "launcher": Entry(
        {"ls": "operator.launchers:ls", "lost": "operator.launchers:lost"},
        "Launchers: the processes that create machines. Report a lost one.",
    ),
}
"""Commands by name. A group names the function of each member."""
AREAS: Mapping[str, tuple[str, ...]] = {
    "Quote and estimate": ("init", "schema", "convert", "quote", "estimate", "simulate", "offers", "models", "gpus"),
    "Submit and follow": (
        *("submit", "ls", "get", "explain", "watch", "logs", "metrics", "compare", "events", "ssh", "exec", "web"),
    ),
    "Change a job": ("cancel", "cap", "retry", "clone", "approve", "refuse", "artifacts", "rm"),
    "Money and policies": ("budget", "policy", "spend", "calibration", "reconcile"),
    "Teams, tokens and secrets": ("login", "team", "token", "secret", "audit"),
    "Channels and Slack": ("channel", "notify", "slack"),
    "Run the daemon": ("serve", "doctor", "sweep", "clouds", "launcher", "blobs", "key"),
}
"""Commands by area, in the order of `gpubroker --help` and of the reference."""
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("status", "jobs", "ps", "list", "queue"), "gpubroker ls` or `gpubroker get JOB"),
    **dict.fromkeys(("stop", "down", "kill", "terminate", "pause"), "gpubroker cancel JOB"),
    **dict.fromkeys(("delete", "remove", "destroy"), "gpubroker rm JOB --data` for its data, or `gpubroker cancel JOB"),
    **dict.fromkeys(("run", "launch", "start", "apply", "create", "up"), "gpubroker submit SPEC.yaml"),
    **dict.fromkeys(("resume", "restart", "rerun"), "gpubroker retry JOB` or `gpubroker cap JOB USD"),
    **dict.fromkeys(("show", "describe", "info", "inspect"), "gpubroker get JOB"),
    **dict.fromkeys(("log", "tail"), "gpubroker logs JOB --follow"),
    **dict.fromkeys(("shell", "connect", "attach"), "gpubroker ssh JOB"),
    **dict.fromkeys(("download", "pull", "fetch"), "gpubroker artifacts JOB --to DIR"),
    **dict.fromkeys(("price", "prices", "market"), "gpubroker offers"),
    **dict.fromkeys(("cost", "costs", "bill", "usage"), "gpubroker spend"),
    **dict.fromkeys(("new", "template"), "gpubroker init FILE"),
    **dict.fromkeys(("whoami", "logout"), "gpubroker login"),
    **dict.fromkeys(("server", "daemon"), "gpubroker serve"),
    "version": "gpubroker --version",
}
"""Commands of similar programs, with the command to use here."""
CODES = "; ".join(f"{int(code)}: {text}" for code, text in MEANINGS.items())


class Commands(LazyGroup):
    """The group of all commands."""

    package = "broker.cli"
    entries = COMMANDS
    areas = AREAS
    synonyms = SYNONYMS


app = typer.Typer(
    name="gpubroker",
    cls=Commands,
    help="Run training jobs on the cheapest suitable cloud GPUs, and never spend more than the job's cap.",
    epilog=f"Exit codes: {CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(version("gpubroker"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""
