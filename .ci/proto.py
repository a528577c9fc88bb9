"""Generate the gRPC stubs from broker/api/proto; with `--check`, say whether the committed ones are up to date."""

from __future__ import annotations

import importlib.resources
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path("broker/api/proto")
PACKAGE = "broker.api.proto.gpubroker.v1"
IMPORT = re.compile(r"^from gpubroker\.v1 import", re.MULTILINE)
"""protoc takes the folder of a .proto for a top-level Python package; ours lies inside of the broker."""


def generate(out: Path) -> None:
    include = str(importlib.resources.files("grpc_tools") / "_proto")
    everything = [f"--python_out={out}", f"--pyi_out={out}", *map(str, sorted(ROOT.rglob("*.proto")))]
    services = [f"--grpc_python_out={out}", *map(str, sorted(ROOT.rglob("*_service.proto")))]
    for paths in (everything, services):
        if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *paths]):
            raise SystemExit("protoc refused; see above")
    for stub in out.rglob("*_pb2*.py*"):
        stub.write_text(IMPORT.sub(f"from {PACKAGE} import", stub.read_text()))


def stubs(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*_pb2*.py*") if "__pycache__" not in p.parts
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        generated_folder = Path(name)
        generate(generated_folder)
        fresh, committed = stubs(generated_folder), stubs(ROOT)
        stale = sorted(path for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))
        if "--check" in sys.argv[1:]:
            if stale:
                raise SystemExit(f"not what the .proto files say: {', '.join(stale)}; run `make proto`")
            return
        for path in stale:
            if path in fresh:
                (ROOT / path).write_text(fresh[path])
            else:
                (ROOT / path).unlink()
        print(f"{len(stale)} of {len(fresh)} stubs changed")


if __name__ == "__main__":
    main()
