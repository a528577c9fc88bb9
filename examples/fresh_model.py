"""Write a model of a known shape with random weights, for `examples/tasks/pretrain.yaml`.

    python -m examples.fresh_model HuggingFaceTB/SmolLM2-135M --out .demo/models/fresh --set num_hidden_layers=6

Config and tokenizer are those of the named model, a Hub id or a folder; `--set` changes the config. The folder is
written under a temporary name and renamed at the end: it exists whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def make(model: str, out: Path, changes: dict[str, object], seed: int = 17) -> int:
    """Write the folder `out` and return the model's number of weights. Raises OSError, ValueError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    if unknown := [key for key in changes if not hasattr(config, key)]:
        raise ValueError(f"--set {unknown[0]}: the config of {model} has no such key")
    config.update(changes)
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(seed)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        fresh.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.rename(out)
    return int(fresh.num_parameters())


def _change(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.fresh_model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a Hub id, or a folder with config.json and tokenizer files")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--set", type=_change, action="append", default=[], metavar="KEY=VALUE", dest="changes")
    arguments = parser.parse_args(argv)
    if arguments.out.exists():
        parser.error(f"--out {arguments.out} already exists; remove it, or name another folder")
    try:
        count = make(arguments.model, arguments.out, dict(arguments.changes))
    except (OSError, ValueError) as e:
        sys.exit(f"{arguments.model}: {str(e).strip().splitlines()[0]}")
    print(f"{arguments.out}: {count:,} random weights")


if __name__ == "__main__":
    main()
