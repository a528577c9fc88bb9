"""Pin the base images of deploy/ by digest: `make pins` asks each image's registry for the digest of its tag.

    python3 .ci/pin_images.py [--check] [FILE ...]

Without `--check`, a tag gets the digest that its registry reports now. With it, no registry is asked: each image must
have a full version, and a digest, where there is one, must be complete. Speaks the distribution API (OCI), with
anonymous tokens. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

DEPLOY = Path(__file__).parent.parent / "deploy"
OWN = "gpubroker"
IMAGE = re.compile(
    r"^(?P<before>FROM |\s+image: )(?P<image>(?P<host>[\w.-]+(?::\d+)?)/(?P<name>[\w./-]+):(?P<tag>[\w.-]+))"
    r"(?P<digest>@\S*)?(?P<after>.*)$",
    re.MULTILINE,
)
VERSION = re.compile(r"\d+\.\d+[.\d]*(-[a-z-]+)?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
KINDS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.v2",
    )
)
REGISTRIES = {"docker.io": "registry-1.docker.io"}
TIMEOUT_S = 30
MAX_BYTES = 4 << 20


def _get(url: str, token: str | None) -> tuple[bytes, str]:
    """Return (body, digest header)."""
    headers = {"Accept": KINDS} | ({"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
        return answer.read(MAX_BYTES), answer.headers.get("Docker-Content-Digest", "")


def _token(challenge: str) -> str:
    """Return an anonymous token for the challenge of a registry."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({name: fields[name] for name in ("service", "scope") if name in fields})
    body, _ = _get(f"{fields['realm']}?{query}", None)
    document = json.loads(body)
    return str(document.get("token") or document["access_token"])


def digest_of(host: str, name: str, tag: str) -> str:
    """Return the digest of a tag. Raises OSError, ValueError if body and reported digest differ."""
    registry = REGISTRIES.get(host, host)
    scheme = "http" if registry.startswith("127.0.0.1:") else "https"
    url = f"{scheme}://{registry}/v2/{name}/manifests/{tag}"
    try:
        body, reported = _get(url, None)
    except urllib.error.HTTPError as refused:
        challenge = refused.headers.get("WWW-Authenticate", "")
        if refused.code != 401 or "realm=" not in challenge:
            raise
        body, reported = _get(url, _token(challenge))
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if reported and reported != digest:
        raise ValueError(f"the registry reports {reported}, and its manifest has {digest}")
    return digest


def pinned(text: str) -> str:
    """Return the text with the current digest of each image."""

    def pin(match: re.Match[str]) -> str:
        try:
            digest = digest_of(match["host"], match["name"], match["tag"])
        except (OSError, ValueError, KeyError) as e:
            sys.exit(f"{match['image']}: {e}; check the tag and the network, nothing of this file was changed")
        return f"{match['before']}{match['image']}@{digest}{match['after']}"

    return IMAGE.sub(pin, text)


def problems(text: str) -> list[str]:
    """Return the images without a full version, or with a damaged digest."""
    wrong = []
    for match in IMAGE.finditer(text):
        if not VERSION.fullmatch(match["tag"]):
            wrong.append(f"{match['image']}: name a full version, such as 3.11.15-slim-bookworm")
        if match["digest"] and not DIGEST.fullmatch(match["digest"][1:]):
            wrong.append(f"{match['image']}{match['digest']}: no digest; run `make pins`")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="pin_images.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="check the files, and ask no registry")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    files = options.files or [*sorted(DEPLOY.glob("Containerfile.*")), DEPLOY / "compose.yaml"]
    wrong = []
    for file in files:
        text = file.read_text()
        if options.check:
            wrong += [f"{file}: {problem}" for problem in problems(text)]
        elif (pinned_text := pinned(text)) != text:
            file.write_text(pinned_text)
            print(f"{file}: pinned")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
