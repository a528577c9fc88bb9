"""Compare this trainer with TRL and HF Trainer, step by step: tokens, loss masks and losses of the same rows.

`python -m benchmarks.against_trl` gives each configuration of `benchmarks.parity.cases` the same weights, order and
learning rates in both trainers. Two settings have other results on purpose and are left out. This trainer adds BOS to a
text without prompt if the tokenizer does not. HF Trainer adds up the means of micro-batches of tags.
TRL runs from the environment, or from the folder `--peers` (`.demo/trl`); without it one line says how to install it.
The last line is JSON. The exit code is 1 if tokens or masks differ, or a loss by more than 1e-6.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".demo" / "trl"
PACKAGES = "trl==1.16.0 'datasets<5' 'pyarrow<24' pandas dill multiprocess xxhash python-dateutil six"
TOLERANCE = 1e-6
MISSING = 69


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of one configuration."""

    tokens_equal: bool
    masks_equal: bool
    loss_rel: float
    """Largest relative difference of the loss of a step."""

    @property
    def is_equal(self) -> bool:
        return self.tokens_equal and self.masks_equal and self.loss_rel <= TOLERANCE


def compare(name: str, folder: Path) -> Comparison:
    """Train a configuration by both trainers. `folder`: empty."""
    from benchmarks.parity import cases, own, theirs
    from trainer.contract.train import TrainConfig

    case = next(case for case in cases.CASES if case.name == name)
    case.write_model(folder / "model")
    path, data_format = case.write_rows(folder)
    settings = {
        "model": str(folder / "model"), "method": {"kind": "full"}, "max_steps": cases.STEPS, "max_length": 256,
        "global_batch": cases.BATCH, "micro_batch": cases.BATCH, "precision": "fp32", "gradient_checkpointing": False,
        "optim": {"lr": 1e-3}, **case.train, "data": {"path": path.name, "eval_share": 0, **case.data},
    }  # fmt: skip
    run = own.build(TrainConfig.model_validate(settings), path, data_format)
    order = run.order()
    peer = theirs.PeerRun(case, run, [case.rows(number) for number in order], folder / "peer")
    rows = run.rows()
    pairs = [
        (ours, other)
        for number, row in zip(order, peer.rows(), strict=True)
        for ours, other in zip(rows[number], row, strict=True)
    ]
    losses = zip(run.losses(), peer.losses(), strict=True)
    return Comparison(
        tokens_equal=all(ours[0] == other[0] for ours, other in pairs),
        masks_equal=all(ours[1] == other[1] for ours, other in pairs if other[1]),
        loss_rel=max(abs(ours - other) / abs(other) for ours, other in losses),
    )


def main() -> int:
    """Print a line for each configuration; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", help="may be repeated")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with TRL, if the environment has none")
    arguments = parser.parse_args()
    sys.path.append(str(arguments.peers))
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    from benchmarks.parity import cases, theirs

    if not theirs.is_installed():
        target = f"--no-deps --target {arguments.peers}"
        print(f"TRL cannot run here; install it: {sys.executable} -m pip install {target} {PACKAGES}", file=sys.stderr)
        return MISSING
    print(json.dumps(theirs.versions()))
    results: list[Comparison] = []
    for case in cases.CASES:
        if arguments.case and case.name not in arguments.case:
            continue
        with tempfile.TemporaryDirectory(prefix="gpubroker-parity-") as scratch:
            result = compare(case.name, Path(scratch))
        results.append(result)
        parts = (f"tokens {result.tokens_equal}", f"masks {result.masks_equal}", f"loss {result.loss_rel:.1e} apart")
        print(f"{case.name} ({case.peer}): {', '.join(parts)}", flush=True)
    print(json.dumps({
        "configurations": len(results),
        "tokens_equal": all(result.tokens_equal for result in results),
        "masks_equal": all(result.masks_equal for result in results),
        "loss_max_rel": max(result.loss_rel for result in results),
    }))  # fmt: skip
    return 0 if all(result.is_equal for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
