"""Bytes of the static files of three web interfaces: `python -m benchmarks.web_bytes`. The last line is JSON.

The wheels of SkyPilot and dstack are fetched by pip into a temporary folder and only counted. Source maps are left out,
because browsers do not load them. `gz` is the sum of the files, each compressed by gzip at level 9.
"""

import gzip
import json
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from broker.web.static_files import static_files

PEERS: Mapping[str, tuple[str, str]] = {
    "skypilot": ("skypilot==0.14.1", "sky/dashboard/out/"),
    "dstack": ("dstack==0.22.5", "dstack/_internal/server/statics/"),
}
"""Requirement and folder of the static files of each peer."""
SOURCE_MAP = ".map"


def peer_files(requirement: str, folder: str) -> Iterator[bytes]:
    """Yield the static files of a peer's wheel. Raises CalledProcessError if pip cannot fetch it."""
    with tempfile.TemporaryDirectory() as target:
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", target, requirement]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with zipfile.ZipFile(next(Path(target).glob("*.whl"))) as wheel:
            for name in wheel.namelist():
                if name.startswith(folder) and not name.endswith(("/", SOURCE_MAP)):
                    yield wheel.read(name)


def sizes(files: Iterator[bytes]) -> dict[str, float]:
    """Return the number of files, and their kilobytes plain and compressed."""
    contents = list(files)
    return {
        "files": len(contents),
        "kb": round(sum(map(len, contents)) / 1000, 1),
        "kb_gz": round(sum(len(gzip.compress(content, 9)) for content in contents) / 1000, 1),
    }


def main() -> None:
    result = {"gpubroker": sizes(file.content for file in static_files().values())}
    for name, (requirement, folder) in PEERS.items():
        try:
            result[name] = sizes(peer_files(requirement, folder))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{name} is left out: pip cannot fetch {requirement} ({type(error).__name__})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
