"""Faults of the home's disk and of the blob store."""

import asyncio
import shutil
import subprocess
from pathlib import Path

from tests.reliability.figures import Figures
from tests.reliability.installation import installation
from tests.reliability.registry import scenario

DISK_MB = 400
FULL_S = 5.0


def _mount(home: Path) -> None:
    """Put the home on a disk of its own."""
    config = (home / "gpubroker.yaml").read_text()
    disk = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "tmpfs", str(home)]
    subprocess.run(disk, check=True, capture_output=True)
    (home / "gpubroker.yaml").write_text(config)


def _fill(file: Path) -> None:
    """Write until no byte is left."""
    with file.open("wb", buffering=0) as filler:
        for size in (1024**2, 4096, 1):
            try:
                while filler.write(bytes(size)):
                    pass
            except OSError:
                continue


def _unmount(home: Path) -> None:
    subprocess.run(["umount", "--lazy", str(home)], check=False, capture_output=True)
    shutil.rmtree(home, ignore_errors=True)


@scenario("503 names the full disk; the daemon lives; a program of this host may fail by it; with space a job succeeds")
async def full_home(figures: Figures) -> None:
    homes: list[Path] = []

    def prepare(home: Path) -> None:
        _mount(home)
        homes.append(home)

    try:
        async with installation(figures, prepare=prepare) as running:
            filler = running.daemon.home / "filler"
            await asyncio.to_thread(_fill, filler)
            message = await running.unready("disk", "cannot write to")
            assert "free space" in message
            await asyncio.sleep(FULL_S)
            assert running.is_alive(), running.log()
            filler.unlink()
            await running.ready()
            first = await running.ended()
            assert first.state == "succeeded" or "No space left on device" in first.reason, first.reason
            await running.trains()
            await running.ends_well()
    finally:
        for home in homes:
            await asyncio.to_thread(_unmount, home)


@scenario("503 names the missing store, and no process creates it; another store is refused; the old one is used again")
async def replaced_blobs(figures: Figures) -> None:
    async with installation(figures) as running:
        blobs = running.daemon.home / "blobs"
        (mark,) = blobs.rglob("broker/store")
        aside = blobs.rename(running.daemon.home / "aside")
        await running.unready("blobs", "is not there")
        assert not blobs.exists()
        blobs.mkdir(mode=0o700)
        other = blobs / mark.relative_to(blobs)
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("another0\n")
        await running.unready("blobs", "is another store's")
        blobs.rename(running.daemon.home / "other")
        aside.rename(blobs)
        await running.ready()
        await running.ends_well(log_is_whole=False)
