"""Faults of the database: damaged pages, a lost WAL, and a server that is stopped."""

import asyncio
import signal
from pathlib import Path

from tests.reliability.figures import Figures
from tests.reliability.installation import Installation, installation, refused_start
from tests.reliability.registry import scenario

PAGE_BYTES = 8192


async def _killed(running: Installation) -> None:
    """Kill the daemon and its database."""
    postgres = running.postgres()
    await running.daemon.kill()
    for process in postgres:
        if process.is_running():
            process.kill()


@scenario("the daemon starts, and 503 names the damaged page and its table; nothing new is bought")
async def damaged_page(figures: Figures) -> None:
    async with installation(figures) as running:
        ((path,),) = await running.query("SELECT pg_relation_filepath('ledger')")
        await running.daemon.stop()
        (file,) = running.daemon.home.glob(f"postgres/**/{path}")
        with file.open("r+b") as pages:
            pages.seek(PAGE_BYTES // 2)
            pages.write(b"\xff" * (PAGE_BYTES // 2))
        await running.daemon.start()
        message = await running.unready("database", "damaged")
        assert "invalid page in block 0" in message


@scenario("the start is refused in one line that names the folder; the database is neither changed nor created again")
async def lost_wal(figures: Figures) -> None:
    async with installation(figures) as running:
        data = running.daemon.home / "postgres" / "postgres" / "data"
        await _killed(running)
        for segment in (data / "pg_wal").iterdir():
            if segment.is_file():
                segment.unlink()
        before = _names(data / "base")
        line = await refused_start(running.daemon)
        assert str(data) in line
        assert "checkpoint record" in line
        assert "backup" in line, line
        assert _names(data / "base") == before


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if not path.name.startswith("pgsql_tmp")}


@scenario("503 within 5 s while PostgreSQL is stopped; afterwards it is ready, and the job ends as if undisturbed")
async def stopped_postgres(figures: Figures) -> None:
    async with installation(figures) as running:
        stopped = running.postgres()
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            await running.unready("database", "does not answer")
            await asyncio.sleep(5)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        await running.ready()
        await running.ends_well()
