"""Connections of each broker to the database and the blob store, whose calls fail before or after their effect."""

import inspect
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from broker.blobs.store_listing import LimitedListing, ListingLimits, list_all
from broker.domain.errors import AlreadyExists, BlobError, BlobsUnavailable, BlobTooLarge, StoreUnavailable
from broker.domain.ids import AttemptId, JobId
from broker.domain.tenancy import Tenant
from broker.ports import BlobInfo, StoreAccess
from broker.ports.blobs import DOCUMENT_BYTES
from broker.store.hints import Hints
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.world import World


LAST = chr(0x10FFFF)
"""Character that sorts after every character of a key."""


class Objects:
    """The blob store itself."""

    def __init__(self) -> None:
        self.data: dict[str, tuple[bytes, int]] = {}
        self.modified: dict[str, float] = {}
        """Time of each object's last write by the store's clock, in virtual seconds."""
        self.writes = 0
        self._keys: list[str] = []
        """Keys in order."""

    def below(self, prefix: str) -> list[str]:
        """Return the keys below the prefix, sorted."""
        first = bisect_left(self._keys, prefix)
        return self._keys[first : bisect_left(self._keys, prefix + LAST, first)]

    def put(self, key: str, data: bytes, now: float) -> None:
        if key not in self.data:
            insort(self._keys, key)
        self.writes += 1
        self.data[key] = (data, self.writes)
        self.modified[key] = now

    def delete(self, key: str) -> None:
        if self.data.pop(key, None) is not None:
            self._keys.remove(key)


class BlobConnection:
    """`ports.Blobs` of one broker; `broker` None: of the machines.

    `ports.Blobs` reports no dates of objects; a mutant reads them from `modified`.
    """

    local = True
    scopes = False

    def __init__(self, world: "World", broker: int | None) -> None:
        self._world = world
        self._broker = broker
        self._objects = world.objects

    async def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        await self._reach()
        if if_absent and key in self._objects.data:
            raise AlreadyExists(f"{key} exists already")
        self._world.watch.before_put(key, data, by_broker=self._broker is not None)
        self._objects.put(key, data, self._world.loop.time())
        self._lose()
        return str(self._objects.writes)

    async def get(self, key: str, *, max_bytes: int = DOCUMENT_BYTES) -> bytes | None:
        await self._reach()
        found = self._objects.data.get(key)
        if found and len(found[0]) > max_bytes:
            raise BlobTooLarge(f"{key} has {len(found[0])} bytes, more than the {max_bytes} that are read")
        return found[0] if found else None

    async def get_range(self, key: str, start: int, size: int) -> bytes | None:
        found = await self.get(key)
        return None if found is None else found[start : start + size]

    async def list(
        self, prefix: str, *, max_objects: int | None = None, max_per_folder: int | None = None
    ) -> Sequence[BlobInfo]:
        await self._reach()
        found = [(key, *self._objects.data[key]) for key in self._objects.below(prefix)]
        infos = (BlobInfo(key=key, bytes=len(data), etag=str(number)) for key, data, number in found)
        return list_all(infos, LimitedListing(prefix, ListingLimits(max_objects, max_per_folder)))

    async def folders(self, prefix: str) -> frozenset[str]:
        await self._reach()
        rests = [key.removeprefix(prefix) for key in self._objects.below(prefix)]
        return frozenset(rest.partition("/")[0] for rest in rests if "/" in rest)

    def modified(self, key: str) -> float:
        return self._objects.modified[key]

    async def delete(self, key: str) -> None:
        await self._reach()
        self._world.watch.keeping.before_delete(key, by_broker=self._broker is not None)
        self._objects.delete(key)
        self._lose()

    async def copy(self, source: str, target: str) -> None:
        data = await self.get(source)
        if data is None:
            raise BlobError(f"cannot copy {source}: it is absent")
        await self.put(target, data)

    async def grant(self, job: JobId, attempt: AttemptId, *, origin: JobId | None = None) -> StoreAccess:
        await self._reach()
        return StoreAccess(url="memory://")

    async def sign(self, key: str, *, for_s: float) -> str:
        raise BlobError(f"cannot sign {key}: memory has no URLs")

    async def _reach(self) -> None:
        if self._broker is not None:
            await self._world.pause(0.002, 0.05)
        weather = self._world.weather
        down = weather.hits("blobs.down_for_all")
        if self._broker is not None:
            down = down or weather.hits("blobs.down", self._broker) or weather.hits("blobs.error")
        if down:
            raise BlobsUnavailable("the blob store does not answer")

    def _lose(self) -> None:
        if self._broker is not None and self._world.weather.hits("blobs.error"):
            raise BlobsUnavailable("the blob store's answer was lost")


class NoHints(Hints):
    """Hints that are all lost, as if no NOTIFY arrived."""

    def hint(self, topic: str) -> None:
        """Wake no waiting call."""


class StoreConnection:
    """Memory store as one process reaches it, with every method of `ports.Store` and `ports.TenantStore`."""

    def __init__(self, world: "World", process: Process, broker: int, inner: Any) -> None:
        self._world = world
        self._process = process
        self._broker = broker
        self._inner = inner

    def as_tenant(self, tenant: Tenant) -> "StoreConnection":
        return StoreConnection(self._world, self._process, self._broker, self._inner.as_tenant(tenant))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)
        if name == "wait" or not inspect.iscoroutinefunction(method):
            return method  # type: ignore[no-any-return]

        world, weather, watch, broker = self._world, self._world.weather, self._world.watch, self._broker

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == "charge":
                watch.budgets.asked(self._process, args[0])
            await world.pause(0.001, 0.02)
            if weather.hits("store.down", broker) or weather.hits("store.error", broker):
                raise StoreUnavailable(f"{name}: no answer, nothing was written")
            before = watch.before_store(name, args)
            answer = await method(*args, **kwargs)
            watch.after_store(self._process, name, args, kwargs, before, answer)
            if weather.hits("store.unknown_commit", broker):
                raise StoreUnavailable(f"{name}: the connection was lost; the commit's fate is unknown")
            if world.sometimes(0.3):
                await world.pause(0.001, 0.2)
            return answer

        setattr(self, name, call)  # found without coming here the next time
        return call
