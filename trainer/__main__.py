"""`python -m trainer`: the agent of one attempt; with `--config`, a fine-tune on this machine alone."""

import argparse
import os
import sys
from pathlib import Path

from trainer.core.errors import leave


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("--config", type=Path, help="a TrainConfig or a job's spec: train here, without a broker")
    parser.add_argument("--output", type=Path, help="where results and checkpoints go (with --config)")
    parser.add_argument(
        "--save-every", type=float, metavar="SECONDS", help="default: the spec's checkpoint.every_s, otherwise 300"
    )
    parser.add_argument("--fsdp", action="store_true", help="divide the model between the GPUs (with --config)")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="GPUs that compute each layer together")
    parser.add_argument(
        "--context", type=int, default=1, metavar="N", help="GPUs that share each sequence, one shard each"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the model's own code, if the configuration permits it too"
    )
    return parser


def main() -> int:
    """Run the agent or the standalone training, and return the contract's exit code."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.config is not None:
        if arguments.output is None:
            parser.error("--config needs --output DIR")
        from trainer.standalone import run as standalone

        mesh_sizes = {"tensor": arguments.tensor, "context": arguments.context}
        return standalone.main(
            arguments.config,
            arguments.output,
            arguments.save_every,
            fsdp=arguments.fsdp,
            mesh_sizes=mesh_sizes,
            trusted=arguments.trust_remote_code,
        )

    if alone := [name for name, value in vars(arguments).items() if value != parser.get_default(name)]:
        parser.error(f"--{alone[0].replace('_', '-')} needs --config FILE")
    from trainer.agent import agent
    from trainer.agent.base import environment
    from trainer.objectstore.objects import ObjectStoreError

    try:
        return agent.main(environment.read_environment(os.environ))
    except (environment.BadEnvironment, ObjectStoreError) as e:
        print(f"trainer: {e}", file=sys.stderr)
        return 64


if __name__ == "__main__":
    leave(main())
