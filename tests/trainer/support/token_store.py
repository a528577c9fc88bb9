"""A store in a folder, and machines whose workers have tokenised: for the tests of rows in the store."""

from pathlib import Path
from typing import Any

from tests.trainer.support.harness import JOB
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload import token_cache as rows
from trainer.batching.examples import Example
from trainer.batching.mmap_dataset import DatasetWriter
from trainer.contract import object_keys as keys
from trainer.contract.documents import AttemptSpec, DataFile
from trainer.core.ipc import RunFolder
from trainer.objectstore.objects import Objects

MB = 1 << 20
DATA = DataFile(key="data", sha256="d" * 64, bytes=1, format="csv")
EXAMPLES = [Example(ids=[number, number + 1], prompt=1) for number in range(500)]
IDENTITY = "e" * 64


def store_url(folder: Path) -> str:
    """Make the store's folder in `folder`, as the broker does, and return its URL."""
    (folder / "store").mkdir(exist_ok=True)
    return (folder / "store").as_uri()


class TokenStore:
    """The store and its machines, each by the number of its attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, store_url(folder)
        self.objects = Objects.open(self.url, {}, "inst")
        self.told: list[str] = []

    def spec(self, number: int, **changes: Any) -> AttemptSpec:
        fields = {"installation": "inst", "job": JOB, "data": DATA, "token_cache_bytes": MB, **changes}
        return AttemptSpec(attempt=f"a{number}", number=number, **fields)

    def machine(self, number: int) -> RunFolder:
        run = RunFolder(root=self.folder / f"machine{number}")
        run.make()
        return run

    def tokenised(self, number: int, *, identity: str = IDENTITY) -> RunFolder:
        run = self.machine(number)
        writer = DatasetWriter(run.root, Example)
        for example in EXAMPLES:
            writer.append(example)
        writer.close({"identity": identity, "rows": len(EXAMPLES)})
        return run

    def sender(self, number: int, run: RunFolder, *, known: str = "", node: int = 0, **spec: Any) -> rows.Sender:
        env = Environment(blobs=self.url, installation="inst", attempt=f"a{number}", workdir=run.root.parent, node=node)
        self.state = AgentState(env=env, run=run)
        return rows.Sender(self.objects, self.state, self.spec(number, **spec), known_cache=known, log=self.told.append)

    async def sent(self, number: int, **more: Any) -> str:
        """Return the manifest's key."""
        await self.sender(number, self.tokenised(number, **more)).run()
        (manifest,) = [key for key in await self.manifests() if f"/a{number}/" in key]
        return manifest

    async def manifests(self) -> list[str]:
        return [*keys.token_cache_manifests(await self.keys())]

    async def keys(self) -> list[str]:
        return await self.objects.keys(keys.checkpoints(JOB))

    async def fetched(self, number: int, **spec: Any) -> tuple[str, Path]:
        run = self.machine(number)
        return await rows.fetch(self.objects, self.spec(number, **spec), run.root, self.told.append), run.root

    def path(self, key: str) -> Path:
        return self.folder / "store" / "inst" / key
