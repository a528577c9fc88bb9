"""The closed form against the tracer over many configurations: `python -m benchmarks.memory_forms [--n 520]`.

Configurations are drawn by a fixed seed from every family of `memory_builds`. They have odd shapes: grouped and single
key heads, tied embeddings, few layers, widths that no power of two divides. Methods, precisions, targets, dropout,
kernels of AdamW, checkpointing, accumulation and lengths vary too. The last line is JSON. About half a second of one
core each.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from broker.estimator.architecture.families import FAMILIES, PAIRS, family_spec
from broker.estimator.memory.device_overhead import CUBLAS_WORKSPACE
from broker.model_catalog.decoder_shape import MIXTURES
from broker.model_catalog.encoder_shape import ENCODERS
from broker.sizing.estimate import estimate, model_shape

WINDOWS: Mapping[str, Mapping[str, Any]] = {
    **{family: {"sliding_window": 128} for family in ("mistral", "gemma2", "starcoder2", "phi3")},
    **{family: {"sliding_window": 128, "sliding_window_pattern": 3} for family in ("gemma3_text", "cohere2")},
    "qwen3": {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
}
"""Windows shorter than the drawn rows, which then need a mask: in all layers, or in some of them."""


def shaped(family: str, pick: random.Random) -> dict[str, Any]:
    """Return a small config of that family with the fields of published configs."""
    heads = pick.choice([4, 6, 8, 12])
    width = pick.choice([32, 48, 64, 80])
    hidden = heads * width
    layers = pick.choice([1, 2, 3, 4, 5, 8, 13])
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    base: dict[str, Any] = {"model_type": family, "vocab_size": pick.choice([1000, 4096, 32000, 50257]), **ends}
    if family in PAIRS:
        return base | pair(family, heads, width, pick)
    if family in ENCODERS:
        return {"model_type": family, **encoder(family, hidden, heads, layers, base["vocab_size"], pick)}
    tied = {"tie_word_embeddings": pick.random() < 0.5}
    if family in ("gpt2", "gpt_bigcode"):
        found = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 2048}
        if pick.random() < 0.5:
            found["n_inner"] = 3 * hidden
        if family == "gpt_bigcode":
            found["multi_query"] = pick.random() < 0.7
        return base | found | ({"resid_pdrop": 0.0, "embd_pdrop": 0.0} if pick.random() < 0.3 else {})
    found = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    if family == "falcon":
        new = pick.random() < 0.4
        kinds = {"new_decoder_architecture": new, "multi_query": True, "parallel_attn": True, "bias": False}
        return base | found | kinds | {"alibi": False} | ({"num_kv_heads": 2} if new else {})
    found["intermediate_size"] = pick.choice([2, 3, 4]) * hidden + pick.choice([0, 16, 40])
    if family in ("gpt_neox", "phi"):
        return base | found | tied
    found["num_key_value_heads"] = pick.choice([n for n in (1, 2, heads // 2, heads) if heads % n == 0])
    if family in ("qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "llama"):
        found["head_dim"] = pick.choice([width, 64])
    return base | found | tied | (dict(WINDOWS.get(family, {})) if pick.random() < 0.5 else {})


def pair(family: str, heads: int, width: int, pick: random.Random) -> dict[str, Any]:
    """Return the fields of an encoder-decoder of that size."""
    hidden, depths = heads * width, [pick.choice([1, 2, 3, 4, 6, 9]) for _ in range(2)]
    inner, rate = pick.choice([2, 3, 4]) * hidden + pick.choice([0, 16, 40]), pick.choice([0.0, 0.1, 0.1])
    if family == "t5":
        kind = pick.choice(["relu", "gated-gelu", "gated-gelu", "gated-silu"])
        tied = {"tie_word_embeddings": False} if pick.random() < 0.5 else {}
        sizes = {"d_model": hidden, "d_kv": pick.choice([width, 64]), "d_ff": inner, "num_heads": heads}
        layers = {"num_layers": depths[0], "num_decoder_layers": depths[1]}
        return sizes | layers | tied | {"feed_forward_proj": kind, "dropout_rate": rate, "decoder_start_token_id": 0}
    return {
        "d_model": hidden, "encoder_layers": depths[0], "decoder_layers": depths[1], "encoder_ffn_dim": inner,
        "decoder_ffn_dim": pick.choice([inner, 2 * hidden]), "encoder_attention_heads": heads, "dropout": rate,
        "decoder_attention_heads": heads, "activation_dropout": pick.choice([0.0, 0.1]),
        "attention_dropout": pick.choice([0.0, 0.1]), "max_position_embeddings": 1024, "decoder_start_token_id": 0,
    }  # fmt: skip


def encoder(family: str, hidden: int, heads: int, layers: int, words: int, pick: random.Random) -> dict[str, Any]:
    """Return the fields of an encoder of that size."""
    inner, rate = pick.choice([2, 3, 4]) * hidden + pick.choice([0, 16, 40]), pick.choice([0.0, 0.1, 0.1])
    labels = {"num_labels": pick.choice([2, 3, 20, 1000])}
    if family == "distilbert":
        sizes = {"dim": hidden, "hidden_dim": inner, "n_heads": heads, "n_layers": layers, "dropout": rate}
        return sizes | labels | {"vocab_size": words, "max_position_embeddings": 1024}
    sizes = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers, "intermediate_size": inner,
        "hidden_dropout_prob": rate,
    }  # fmt: skip
    if family == "vit":
        return sizes | labels | {"image_size": pick.choice([224, 384]), "patch_size": pick.choice([14, 16, 32])}
    kinds = pick.choice([1, 2])
    return sizes | labels | {"vocab_size": words, "max_position_embeddings": 1026, "type_vocab_size": kinds}


def asked(config: Mapping[str, Any], pick: random.Random) -> dict[str, Any]:
    """Draw the training options of a config."""
    method = pick.choice(["full", "lora", "lora"])
    names = sorted(set(family_spec(model_shape("drawn", config)).names.values()))
    more: dict[str, Any] = {}
    if config["model_type"] in PAIRS:
        more = {"target_seq": pick.choice([None, 32, 100, 512]), "attention": pick.choice(["sdpa", "sdpa", "eager"])}
    return more | {
        "method": method,
        "precision": pick.choice(["bf16-autocast", "bf16-autocast", "fp32", "bf16"]),
        "optimizer": pick.choice(["adamw_fused", "adamw_foreach"]),
        "seq": pick.choice([64, 128, 250, 512, 1024]),
        "micro_batch": pick.choice([1, 2, 3, 4]),
        "accumulate": pick.random() < 0.3,
        "gradient_checkpointing": pick.random() < 0.5,
        "lora_r": pick.choice([4, 8, 16, 64]),
        "lora_dropout": pick.choice([0.0, 0.05, 0.1]),
        "lora_targets": pick.choice(["all-linear", "all-linear", ",".join(pick.sample(names, min(2, len(names))))]),
    }


def cases(
    number: int, seed: int = 6, only: Collection[str] = (), *, quantised: bool = False, sharding: str | None = None,
    gpus: Sequence[int] = (2,),
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:  # fmt: skip
    """Yield `number` pairs of (config, ask), families in turn: `only` those, or all decoders. `quantised`: over a base
    of 4 bits. `sharding`: of so many GPUs in turn (`gpus`).
    """
    pick, families = random.Random(seed), sorted(only or set(FAMILIES) - MIXTURES - ENCODERS)
    for i in range(number):
        config = shaped(families[i % len(families)], pick)
        ask = asked(config, pick)
        if quantised:
            ask["method"] = "qlora"
            ask["precision"] = "bf16-autocast" if ask["precision"] == "fp32" else ask["precision"]
        yield config, ask | ({"gpus": gpus[i % len(gpus)], "sharding": sharding} if sharding else {})


def compared(config: Mapping[str, Any], ask: Mapping[str, Any]) -> tuple[int, int, str, str]:
    """(traced, estimated) bytes and the segments of both."""
    from accelerate.state import AcceleratorState

    from trainer.memtrace import __main__ as memtrace_main
    from trainer.memtrace import tracer as memtrace

    AcceleratorState._reset_state(True)
    many = ask.get("gpus", 1)
    words = {"bf16-autocast": "bf16", "bf16": "bf16-pure"}
    arguments = [
        *("--config", "x", "--method", ask["method"], "--optimizer", ask["optimizer"]),
        *("--precision", words.get(ask["precision"], ask["precision"]), "--seq", str(ask["seq"])),
        *("--micro-batch", str(ask["micro_batch"])),
        *("--global-batch", str(ask["micro_batch"] * many * (2 if ask["accumulate"] else 1))),
        *("--gpus", str(many), "--sharding", ask.get("sharding", "ddp")),
        *("--lora-r", str(ask["lora_r"]), "--lora-dropout", str(ask["lora_dropout"])),
        *("--lora-targets", ask["lora_targets"]),
        *(["--gradient-checkpointing"] if ask["gradient_checkpointing"] else []),
        *("--target-seq", str(ask.get("target_seq") or 0), "--attention", ask.get("attention", "sdpa")),
    ]
    peak = memtrace.extrapolate(
        config, memtrace_main.options(memtrace_main.parser().parse_args(arguments), config["model_type"])
    )
    estimated = estimate(config=config, **ask)
    return (
        peak.peak_allocated_bytes,
        estimated["peak_allocated_bytes"] - CUBLAS_WORKSPACE,
        peak.segment,
        estimated["segment"],
    )


def _p90(errors: Collection[float]) -> float:
    return sorted(errors)[int(0.9 * (len(errors) - 1))]


def main() -> None:
    """Print each family's errors and the worst cases, then one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--n", type=int, default=520)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many, to run the rest in parts")
    parser.add_argument("--worst", type=int, default=12)
    parser.add_argument("--encoders", action="store_true", help="encoders with a head, in place of decoders")
    parser.add_argument("--pairs", action="store_true", help="encoder-decoders, in place of decoders")
    parser.add_argument("--quantised", action="store_true", help="QLoRA of 4 bits, in place of LoRA and full")
    parser.add_argument("--sharding", choices=("ddp", "fsdp"), help="of several GPUs, in place of one")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="so many in turn, with --sharding")
    args = parser.parse_args()
    only = ENCODERS if args.encoders else PAIRS if args.pairs else ()
    errors: dict[str, list[float]] = defaultdict(list)
    rows: list[tuple[float, str]] = []
    drawn = cases(args.n, args.seed, only, quantised=args.quantised, sharding=args.sharding, gpus=args.gpus)
    for config, ask in islice(drawn, args.skip, None):
        traced, estimated, there, here = compared(config, ask)
        error = 100 * (estimated / traced - 1)
        errors[config["model_type"]].append(abs(error))
        rows.append((error, f"{traced / 2**20:9.2f} MiB in {there} / {here}: {json.dumps(config)} {json.dumps(ask)}"))
    for family, found in sorted(errors.items()):
        most = f"p90 {_p90(found):.2f} %, worst {max(found):.2f} %"
        print(f"{family:14} {len(found):4} median {statistics.median(found):.3f} %, {most}")
    for error, words in sorted(rows, key=lambda r: -abs(r[0]))[: args.worst]:
        print(f"{error:+7.2f} % {words}")
    every = [e for found in errors.values() for e in found]
    document = {"n": len(every), "seed": args.seed, "median_abs_pct": round(statistics.median(every), 4)}
    document["p90_abs_pct"] = round(_p90(every), 4)
    print(json.dumps(document | {"max_abs_pct": round(max(every), 3), "above_2_pct": sum(e > 2 for e in every)}))


if __name__ == "__main__":
    main()
