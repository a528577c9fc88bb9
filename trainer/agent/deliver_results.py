"""Delivery of verified results to their additional destinations; a failure never affects the results."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from trainer.agent.base import prepare
from trainer.checkpoint import protocol
from trainer.contract import object_keys
from trainer.contract.output import OutputConfig
from trainer.core import disk_space
from trainer.objectstore.objects import BadContent, Objects, ObjectStoreError
from trainer.publish import publisher

RESULTS = (*(f"{name}/" for name in publisher.FOLDERS), *publisher.TOP_LEVEL_FILES)
PAUSES_S = (5.0, 30.0)
"""Pauses in seconds before a failed delivery is repeated."""
LIMIT_S = 3600.0
RETRY = "fetch them with `gpubroker artifacts` and run `python -m trainer.publish`"


async def verified(objects: Objects, manifest: str) -> bool:
    """Return `checkpoint.protocol.verified` of a manifest, with retries while the store is unreachable.

    Raises: ObjectStoreError.
    """
    return await prepare.retry_while_unreachable(lambda: protocol.verified(objects, manifest), prepare.RETRY_FOR_S)


async def deliver(
    objects: Objects,
    manifest: str,
    output: OutputConfig,
    *,
    folder: Path,
    job: str,
    secrets: Mapping[str, str],
    endpoint: str | None,
    report: Callable[[str, str], None],
    pauses_s: tuple[float, ...] = PAUSES_S,
    within: Callable[[float], AbstractAsyncContextManager[object]] = asyncio.timeout,
) -> str:
    """Fetch the verified results from the store and publish them as `output` requests.

    Return the reason of a failure, or an empty text. `within` limits a block to a number of seconds by a
    TimeoutError.
    """
    if output.push is None and output.copy_to is None:
        return ""
    left = output
    try:
        async with within(LIMIT_S):
            await _fetch(objects, manifest, folder)
            for pause_s in (*pauses_s, None):
                delivered, failed = await publisher.publish(folder, left, job=job, secrets=secrets, endpoint=endpoint)
                for line in delivered:
                    report("published", line)
                if not failed:
                    return ""
                left = _failed_destinations(left, failed)
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
    except (ObjectStoreError, BadContent, OSError) as e:  # includes TimeoutError
        failed = [str(e) or "the results were not published in time"]
    why = f"{'; '.join(failed)}. The results are safe: {RETRY}"
    report("not_published", why)
    return why


def _failed_destinations(output: OutputConfig, failed: list[str]) -> OutputConfig:
    """Return `output` with only the destinations that the messages in `failed` name."""
    words = " ".join(failed)
    return output.model_copy(
        update={
            "push": output.push if "output.push:" in words else None,
            "copy_to": output.copy_to if "output.copy_to:" in words else None,
        }
    )


async def _fetch(objects: Objects, key: str, folder: Path) -> None:
    """Download the results without the training state. Raises: BadContent, ObjectStoreError, OSError."""
    manifest, source = await protocol.read_manifest(objects, key), object_keys.files_prefix(key)
    files = [file for file in manifest.files if file.path.startswith(RESULTS)]
    try:
        for file in files:
            await objects.download(source + file.path, folder / file.path, size=file.bytes, sha256=file.sha256)
    except (ObjectStoreError, OSError) as e:
        if disk_space.is_full(e):
            raise OSError(
                f"they could not be fetched: {disk_space.disk_full_message(folder, sum(f.bytes for f in files))}"
            ) from None
        raise
