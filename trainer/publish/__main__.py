"""Publish the results of a job: `python -m trainer.publish FOLDER --config SPEC`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.core.config_file import BadConfig, read_config
from trainer.core.errors import leave
from trainer.publish.publisher import publish


def main(argv: Sequence[str] | None = None) -> int:
    """Publish, and return 0; 75 if something was not published, 64 for an unreadable configuration."""
    parser = argparse.ArgumentParser(prog="python -m trainer.publish", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a job's results")
    parser.add_argument("--config", type=Path, required=True, help="a job's spec or a TrainConfig with output")
    parser.add_argument("--name", help="folder below output.copy_to.url; default: the name of FOLDER")
    arguments = parser.parse_args(argv)
    try:
        output = read_config(arguments.config).output
    except (BadConfig, OSError) as e:
        print(f"{arguments.config}: {e}", file=sys.stderr)
        return 64
    if output.push is None and output.copy_to is None:
        print(f"{arguments.config}: output: has neither push nor copy_to; name where the results go", file=sys.stderr)
        return 64
    name = arguments.name or arguments.folder.resolve().name
    endpoint = os.environ.get("HF_ENDPOINT")
    delivered, failed = asyncio.run(publish(arguments.folder, output, job=name, secrets=os.environ, endpoint=endpoint))
    for line in delivered:
        print(line)
    for line in failed:
        print(line, file=sys.stderr)
    return 75 if failed else 0


if __name__ == "__main__":
    leave(main())
