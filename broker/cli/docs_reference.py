"""Pages of docs/ that are written from the code: `python -m broker.cli.docs_reference docs`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.main import get_command

from broker.cli.core.exit_codes import MEANINGS
from broker.cli.main import app
from broker.cli.spec import schema
from broker.daemon.config import DaemonConfig
from broker.domain.spec import JobSpec

CLI_HEAD = """\
# The command line

Written from the code by `python -m broker.cli.docs_reference docs`; a test says when it is not current.

`gpubroker` talks to a daemon over its HTTP API. Which daemon, in this order:

1. `GPUBROKER_URL` (with `GPUBROKER_TOKEN`);
2. `client.json` of a `GPUBROKER_HOME` that is set: `gpubroker serve` writes it (0600);
3. the login that `gpubroker login URL` stored in `~/.config/gpubroker/login.json` (0600);
4. `client.json` of the default home, `~/.local/state/gpubroker`.

`GPUBROKER_TOKEN` alone replaces the token of whatever was found. `JOB` is an id, the start of one (4 characters
or more), a job's name where only one has it, or `last`, the newest of your own.

With `--json` a command writes one JSON document to stdout, in case of an error `{"error": {"kind", "exit", "message",
"problems": [{"field", "message"}]}}`, and everything for people to stderr; it never asks. `events --follow` and
`logs --follow` write one document a line instead. Money is a decimal string of dollars, times are ISO 8601 in UTC.

Ctrl-C ends the command, never the job. Completion: `gpubroker --install-completion`.
"""
SPEC_HEAD = """\
# The spec of a job

Written from the code by `python -m broker.cli.docs_reference docs`; a test says when it is not current. As JSON
Schema: [spec.schema.json](spec.schema.json), or `GET /v1/schema/job`. `gpubroker init` writes a spec with these texts.

YAML or JSON, by the rules of YAML 1.2: `on` and `no` are words, `1e-4` is a number. A key that is not listed here, or
is given twice, is an error. Paths of files are relative to the spec. `--set train.epochs=2` changes one setting from
the command line.

The command line takes a spec without `cap_usd`: `submit` proposes one (P90 of the best offer × 1.25).

An editor checks a spec while you write with this first line:

    # yaml-language-server: $schema=docs/spec.schema.json
"""


CONFIG_HEAD = """\
# Configuration of the daemon

Written from the code by `python -m broker.cli.docs_reference docs`; a test says when it is not current.

`gpubroker serve` reads `gpubroker.yaml` in its home (`--config` names another file), then the environment, then its
options; later ones win. The file is YAML 1.2, as specs are. A key that is unknown or given twice, or a wrong value,
stops it with one line. Times are seconds, sizes bytes.

Rented clouds are off until they have a section, which may be empty: `runpod: {}`. Keys are never in the file:
[clouds.md](clouds.md).
"""
CONFIG_TAIL = """\

| environment | |
|---|---|
| `GPUBROKER_HOME` | `home`, where the file does not name it |
| `GPUBROKER_DATABASE_URL`, `GPUBROKER_BLOBS`, `GPUBROKER_LOG_LEVEL` | `database_url`, `blobs`, `log_level` |
| `GPUBROKER_MASTER_KEY` | 32 bytes as urlsafe base64: seals secrets; without it `master.key` in the home |
| `GPUBROKER_REGISTRY_PASSWORD` | of a private registry of images; never in the file |
| `GPUBROKER_PG_BINDIR` | folder of `initdb` and `postgres` for the embedded database |
| `HF_TOKEN`, `HF_ENDPOINT` | for reading the config of gated or mirrored models |
| `CLOUDFLARE_API_TOKEN` | makes temporary credentials of R2 |
| the blob store's own | credentials and region of S3, GCS, Azure, as their tools read them |

The home holds `postgres/`, `blobs/`, `providers/`, `master.key`, `installation` (the four characters in every name),
and `client.json`, by which this user's CLI finds the daemon. Back up `master.key` and the database together.
"""


def cli() -> str:
    """docs/cli.md."""
    codes = "\n".join(f"| {int(code)} | {text} |" for code, text in MEANINGS.items())
    parts = [CLI_HEAD, f"## Exit codes\n\n| code | meaning |\n|---|---|\n{codes}\n"]
    return "\n".join([*parts, *_commands(get_command(app), "gpubroker")])


def _commands(group: Any, above: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{above} {name}")
        else:
            yield _command(command, f"{above} {name}")


def _command(command: Any, name: str) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join([name, *(_argument(a) for a in arguments), "[OPTIONS]" if options else ""]).strip()
    lines = [f"## {name}", "", f"    {usage}", "", " ".join(command.help.split()), ""]
    described = [(_argument(a), a.help) for a in arguments if getattr(a, "help", None)]
    described += [(", ".join([*o.opts, *o.secondary_opts]), o.help or "") for o in options]
    if described:
        lines += ["| | |", "|---|---|", *(f"| `{what}` | {text} |" for what, text in described), ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def spec() -> str:
    """docs/spec.md."""
    return _settings(SPEC_HEAD, JobSpec)


def configuration() -> str:
    """docs/configuration.md."""
    return _settings(CONFIG_HEAD, DaemonConfig) + CONFIG_TAIL


def _settings(head: str, root: type[BaseModel]) -> str:
    lines = [head, "| setting | default | |", "|---|---|---|"]
    for path in schema.paths((), root):
        field = schema.fields(path[:-1], root)[path[-1]]
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{'.'.join(path)}` | {_default(path, root)} | {text} |")
    return "\n".join(lines) + "\n"


def _default(path: schema.Path, root: type[BaseModel]) -> str:
    field = schema.fields(path[:-1], root)[path[-1]]
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if schema.models(path, root):
        return "" if default is not None else "absent"
    if isinstance(default, Path):  # of this machine
        return "see there"
    return "absent" if default is None else f"`{json.dumps(default, default=str)}`"


def json_schema() -> str:
    """docs/spec.schema.json."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **JobSpec.model_json_schema()}, indent=2) + "\n"


FILES = {"cli.md": cli, "spec.md": spec, "spec.schema.json": json_schema, "configuration.md": configuration}

if __name__ == "__main__":
    for name, write in FILES.items():
        (Path(sys.argv[1]) / name).write_text(write())
