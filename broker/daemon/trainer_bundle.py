"""Source of the trainer on rented machines: the operator's image, or this installation's code in the blob store."""

import asyncio
import contextlib
import io
import tarfile
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from broker.daemon.config import TrainerConfig
from broker.domain.errors import AlreadyExists, BlobError, BlobsUnavailable, InvalidInput, Problem, Rejected
from broker.domain.instance import TrainerBundle, TrainerImage
from broker.ports import Blobs

RECIPE = ("constraints-trainer.txt", "pyproject.toml", "deploy/trainer_install.sh", "deploy/trainer_requirements.py")
"""Repository files that a machine needs to install the trainer, in addition to the package `trainer`."""
SIGNED_S = 3600.0
"""Seconds for which a machine may download the bundle: longer than the boot deadline of any cloud."""
PASSWORD = "GPUBROKER_REGISTRY_PASSWORD"


def image_of(config: TrainerConfig, env: Mapping[str, str]) -> TrainerImage | None:
    """Return the operator's image; None if none is set. Raises InvalidInput if only user name or password is set."""
    if config.image is None:
        return None
    username, password = config.registry_username or "", env.get(PASSWORD, "")
    if bool(username) != bool(password):
        absent = f"set {PASSWORD}" if username else "set trainer.registry_username"
        message = f"a private registry needs user name and password; {absent}, or leave out both"
        raise InvalidInput(Problem(field="trainer.registry_username", message=message))
    return TrainerImage(reference=config.image, username=username, password=password)


class TrainerSource:
    """Trainer source of each launch. Without an image, the bundle is uploaded before the first launch."""

    def __init__(self, blobs: Blobs, image: TrainerImage | None) -> None:
        self._blobs, self._image = blobs, image
        self._bundle: str | None = None
        self._busy = asyncio.Lock()

    async def __call__(self, *, for_image: bool = False) -> TrainerImage | TrainerBundle:
        """Return the operator's image or the bundle. `for_image`: always the bundle, for the image of a job.

        Raises Rejected if the blob store cannot sign a URL, and BlobsUnavailable.
        """
        if self._image is not None and not for_image:
            return self._image
        async with self._busy:
            self._bundle = self._bundle or await self._upload()
        try:
            url = await self._blobs.sign(_key(self._bundle), for_s=SIGNED_S)
        except BlobsUnavailable:
            raise
        except BlobError as e:
            fix = "leave out script.image" if for_image else "set trainer.image"
            raise Rejected(f"the trainer cannot be handed to the machine: {e}, or {fix}") from e
        return TrainerBundle(url=url, sha256=self._bundle)

    async def _upload(self) -> str:
        data = await asyncio.to_thread(bundle)
        name = sha256(data).hexdigest()
        with contextlib.suppress(AlreadyExists):  # another broker, or an earlier process, has uploaded it
            await self._blobs.put(_key(name), data, if_absent=True)
        return name


def _key(name: str) -> str:
    return f"trainer/{name}.tar"


def bundle() -> bytes:
    """Return the trainer and its install recipe as a tar. The same code gives the same bytes on every host."""
    root = files("broker") / "_trainer"
    recipe: Traversable = root if root.is_dir() else Path(__file__).parents[2]
    members = {path: (recipe / path).read_bytes() for path in RECIPE} | _package(files("trainer"), "trainer")
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(members):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(members[path]), 0o755 if path.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(members[path]))
    return target.getvalue()


def _package(folder: Traversable, path: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            files |= _package(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".py"):
            files[f"{path}/{entry.name}"] = entry.read_bytes()
    return files
