"""Valid files of every format that the daemon parses, made by the libraries that write them."""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache

import yaml
from arro3.core import Array, DataType, Table
from arro3.io import write_parquet
from PIL import Image

from tests.support.build import spec
from trainer.contract.documents import CheckpointRef, Final, Heartbeat

ROWS = [
    {"prompt": "Add 1 and 2.", "answer": "3", "n": 1, "score": 0.5, "tags": ["a", "b"]},
    {"prompt": 'Say "é", please', "answer": "line\nbreak", "n": -2, "score": 1e-9, "tags": []},
    {"prompt": "", "answer": "ünï", "n": 2**40, "score": -0.0, "tags": ["c"]},
]
CHATS = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 3
CONFIGS: tuple[Mapping[str, object], ...] = (
    {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    },
    {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32, "vocab_size": 99,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
        "type_vocab_size": 2, "id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1},
    },
    {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64,
        "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 128, "feed_forward_proj": "gated-gelu",
    },
    {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
    },
    {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_channels": 3,
    },
)  # fmt: skip

_SAVED = CheckpointRef(manifest="jobs/a/manifest.json", step=3, save_s=10, stall_s=1, bytes=1)
_HEARTBEAT = Heartbeat(attempt="a" * 13, boot="b", seq=1, step=3, total_steps=9, checkpoint=_SAVED)
_FINAL = Final(attempt="a" * 13, outcome="completed", message="ok", exit_code=0, step=9, checkpoint=_SAVED)


@cache
def seeds() -> Mapping[str, tuple[bytes, ...]]:
    """Return valid files by target name (`targets.TARGETS`)."""
    text = json.dumps(ROWS).encode()
    lines = "\n".join(json.dumps(row) for row in ROWS).encode()
    chats = "\n".join(json.dumps(row) for row in CHATS).encode()
    pictures = tuple(_pictures())
    return {
        "csv": (b'prompt,answer\r\n"a ""b""",1\r\nx,"y\nz"\r\n', "p;q\né;ü\n".encode(), b"a\tb\n1\t2\n"),
        "json": (text, json.dumps(CHATS).encode(), text.decode().encode("utf-16")),
        "jsonl": (lines, chats),
        "parquet": tuple(_parquet()),
        "tar": (
            _tar({"data.csv": b"a,b\n1,2\n", "run.py": b"print(1)\n"}),
            _tar({f"{name}.png": pictures[0] for name in "ab"}),
        ),
        "gzip": (gzip.compress(_tar({"data.jsonl": lines}), mtime=0), _tar({"data.csv": b"a,b\n1,2\n"}, "xz")),
        "zip": (archive({"data.csv": b"a,b\n1,2\n"}), archive({"yes/1.png": pictures[0], "no/2.jpg": pictures[1]})),
        "image": pictures,
        "config": tuple(json.dumps(config).encode() for config in CONFIGS),
        "spec": (spec().model_dump_json(exclude_unset=True).encode(),),
        "yaml": (
            yaml.safe_dump(spec().model_dump(mode="json", exclude_unset=True)).encode(),
            b"a: &x [1, *x]\nb: 0x1F\n",
            b"a: !!timestamp 2001-02-03\nb: !!float 1.5\nc: !!bool true\n",
        ),
        "heartbeat": (_HEARTBEAT.model_dump_json().encode(),),
        "final": (_FINAL.model_dump_json().encode(),),
    }  # fmt: skip


def _pictures() -> Iterator[bytes]:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        out = io.BytesIO()
        Image.radial_gradient("L").resize((24, 24)).convert("RGB").save(out, kind)
        yield out.getvalue()


def _parquet() -> Iterator[bytes]:
    texts = Table.from_pydict(
        {"prompt": Array(["a", "", None], DataType.utf8()), "n": Array([1, 2, 3], DataType.int64())}
    )
    many = Table.from_pydict({"a": Array(list(range(500)), DataType.int32()), "b": Array(["x"] * 500, DataType.utf8())})
    for table, compression in ((texts, "snappy"), (texts, "zstd(3)"), (many, "gzip(6)"), (many, "uncompressed")):
        out = io.BytesIO()
        write_parquet(table, out, compression=compression)
        yield out.getvalue()


def _tar(files: Mapping[str, bytes], compression: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of `files`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()
