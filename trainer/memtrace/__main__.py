"""Peak memory of a fine-tune, traced without a GPU or weights: `python -m trainer.memtrace --config CONFIG.json`.

transformers and peft import sklearn, bitsandbytes and others if they are installed, which takes seconds. This process
blocks these imports, unless a model is quantised or shared by several GPUs.
"""

# ruff: noqa: E402 - names are shut out before the libraries are imported

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

UNUSED = (
    *("bitsandbytes", "boto3", "botocore", "datasets", "pandas", "scipy", "sklearn", "tensorboard"),
    *("torchao", "torchaudio", "torchvision"),
)
if __name__ == "__main__" and not any(n in word for word in sys.argv for n in ("qlora", "--gpus")):
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # import then raises ModuleNotFoundError

import peft
import torch
import transformers

from trainer.contract.train import FullConfig, LoraConfig, QloraConfig, TrainConfig
from trainer.core.errors import Fault
from trainer.memtrace.device_emulation import BLOCK
from trainer.memtrace.inputs import BY_TASK, KINDS, TRAINED
from trainer.memtrace.probe import TraceOptions
from trainer.memtrace.tracer import count, extrapolate


def options(args: argparse.Namespace, family: str = "") -> TraceOptions:
    task = args.task or KINDS.get(family, "causal_lm")
    is_preset = args.lora_targets in ("all-linear", "attention")
    kind = QloraConfig if args.method == "qlora" else LoraConfig
    lora = kind(r=args.lora_r, dropout=args.lora_dropout, targets=args.lora_targets if is_preset else "all-linear")
    if args.padded and args.micro_batch < 2:
        raise ValueError("a micro-batch of one row has no padding; leave out --padded")
    if args.seq < 2 and task == "causal_lm":
        raise ValueError(f"--seq {args.seq}: a row of one token has no next one to learn; give 2 or more")
    if args.gpus > 1 and task == "text_to_image":
        raise ValueError("a UNet is traced on one GPU; leave out --gpus")
    train = TrainConfig(
        model="traced",
        task=TRAINED.get(task, task),
        data=BY_TASK[task].columns(),
        method=FullConfig() if args.method == "full" else lora,
        micro_batch=args.micro_batch,
        global_batch=args.global_batch or args.micro_batch * args.gpus,
        max_length=max(8, args.seq),
        precision=args.precision.removesuffix("-pure"),
        gradient_checkpointing=args.gradient_checkpointing,
    )
    return TraceOptions(
        train=train,
        sequence=args.seq,
        target=args.target_seq,
        attention=args.attention,
        device=args.device,
        foreach=args.optimizer == "adamw_foreach",
        padded=args.padded,
        pure=args.precision.endswith("-pure"),
        targets=() if is_preset else tuple(args.lora_targets.split(",")),
        task=task,
        gpus=args.gpus,
        divided=args.gpus > 1 and args.sharding == "fsdp",
    )


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m trainer.memtrace", description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--config", type=Path, required=True, help="a transformers config.json")
    arguments.add_argument("--task", choices=tuple(BY_TASK), help="task to trace; default: the family's task")
    arguments.add_argument("--method", choices=("full", "lora", "qlora"), default="lora")
    arguments.add_argument("--optimizer", choices=("adamw_fused", "adamw_foreach"), default="adamw_fused")
    arguments.add_argument("--precision", choices=("bf16", "fp16", "fp32", "bf16-pure", "fp16-pure"), default="bf16")
    arguments.add_argument("--seq", type=int, default=512, help="tokens of every row; of a UNet pixels of a side")
    arguments.add_argument("--target-seq", type=int, default=0, help="tokens that an encoder-decoder generates")
    arguments.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    arguments.add_argument("--padded", action="store_true", help="rows differ in length; needs two or more")
    arguments.add_argument("--micro-batch", type=int, default=4)
    arguments.add_argument("--global-batch", type=int, default=0, help="default: one micro-batch of each GPU")
    arguments.add_argument("--gpus", type=int, default=1)
    arguments.add_argument(
        "--sharding", choices=("ddp", "fsdp"), default="ddp", help="how several GPUs share the model"
    )
    arguments.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    arguments.add_argument("--lora-r", type=int, default=16)
    arguments.add_argument("--lora-dropout", type=float, default=0.05)
    arguments.add_argument(
        "--lora-targets", default="all-linear", help="all-linear, attention, or names separated by commas"
    )
    arguments.add_argument("--count", action="store_true", help="print the model's parameters too")
    arguments.add_argument("--device", choices=tuple(BLOCK), default="cuda", help="device whose kernels are emulated")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Print the peak as one JSON object. Return 2, with one line on stderr, if the step cannot be traced."""
    args = parser().parse_args(argv)
    try:
        config = json.loads(args.config.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("is not a JSON object")
        started = time.monotonic()
        ask = options(args, str(config.get("model_type", config.get("_class_name"))))
        peak = extrapolate(config, ask)
        counted = dict(zip(("parameters", "trainable"), count(config, ask), strict=True)) if args.count else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, Fault) as e:
        print(f"{args.config}: {(str(e).strip().splitlines() or [type(e).__name__])[0]}", file=sys.stderr)
        return 2
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    seconds = math.ceil((time.monotonic() - started) * 1000) / 1000
    print(json.dumps({**asdict(peak), **counted, "versions": versions, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
