"""The embedded PostgreSQL with real processes: after any kill the next start just works."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg
import psutil
import pytest

from broker.store.embedded import server as embedded
from broker.store.embedded.server import BinariesNotFound, EmbeddedPostgres, EmbeddedPostgresError, StateFolderLocked
from broker.store.migrate import migrate

REPOSITORY = Path(__file__).parents[2]
EXEC = REPOSITORY / "broker/store/embedded/exec_postgres.py"
DAEMON = """
import asyncio, os, sys
from pathlib import Path
from broker.store.embedded.server import EmbeddedPostgres

async def main():
    async with await EmbeddedPostgres.start(Path(sys.argv[1]), durable=False) as server:
        print(server.dsn, os.geteuid(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
READ = "SELECT id FROM kept"
KEEP = ("CREATE TABLE kept (id integer)", "INSERT INTO kept VALUES (7)", READ)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to leave root")


@asynccontextmanager
async def daemon(state_dir: Path, *wrapper: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a daemon in a process of its own; killed at the end if the test has not done it."""
    command = (*wrapper, sys.executable, "-c", DAEMON, str(state_dir))
    process = await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await eventually(lambda: not servers(state_dir))


async def dsn_of(process: asyncio.subprocess.Process, uid: int | None = None) -> str:
    """Return the daemon's address, once it is up; `uid` is the user it should run as (this one)."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = await asyncio.wait_for(process.stdout.readline(), 300)
    assert line, (await process.stderr.read()).decode()
    dsn, seen = line.decode().split()
    assert int(seen) == (os.geteuid() if uid is None else uid)
    return dsn


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


async def eventually(check: Callable[[], bool], seconds: float = 300) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if check():
                return
            await asyncio.sleep(0.01)


@contextmanager
def somebody(*command: str) -> Iterator[int]:
    """Yield the PID of an unrelated child that becomes a zombie, because it is not reaped before the end."""
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def execute(dsn: str, *statements: str) -> object:
    """Run the statements on one connection; the last one's value."""
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetchval(statements[-1])
    finally:
        await connection.close()


async def answer(dsn: str) -> None:
    """Wait until the database answers with the rows that KEEP wrote."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                assert await execute(dsn, READ) == 7
                return
            await asyncio.sleep(0.01)


def data_of(state_dir: Path) -> Path:
    return state_dir.resolve() / "postgres" / "data"


def postmaster_of(state_dir: Path) -> int:
    return int((data_of(state_dir) / "postmaster.pid").read_text().split()[0])


def servers(state_dir: Path) -> list[int]:
    """Return PIDs of the processes, zombies left out, that run on the folder's data."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(data_of(state_dir)) in process.cmdline() or process.cwd() == str(data_of(state_dir)):
                found.append(process.pid)
    return found


async def test_the_daemons_role_has_no_rights_beyond_its_database(tmp_path: Path) -> None:
    """A statement that reaches the daemon's connection can read no file, make no role and skip no policy."""
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
        await migrate(server.dsn)
        rights = "rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls"
        for role in ("gpubroker", "gpubroker_api"):
            assert await execute(server.dsn, f"SELECT {rights} FROM pg_roles WHERE rolname = '{role}'") is False
        for statement in ("CREATE ROLE thief", "COPY (SELECT 1) TO PROGRAM 'cat'", "SELECT pg_read_file('PG_VERSION')"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await execute(server.dsn, statement)


async def test_a_fresh_start_answers_and_a_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    async with await EmbeddedPostgres.start(tmp_path / "state", durable=False) as server:
        assert await execute(server.dsn, "SELECT current_database()") == "gpubroker"
        assert await execute(server.dsn, "SELECT current_setting('lc_messages')") == "C"
        assert psutil.Process(postmaster_of(tmp_path / "state")).ppid() == os.getpid()
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "state/postgres").stat().st_mode & 0o777 == 0o700
    assert not servers(tmp_path / "state")
    await server.stop()


async def test_the_server_syncs_to_disk_by_default(tmp_path: Path) -> None:
    async with await EmbeddedPostgres.start(tmp_path) as server:
        assert await execute(server.dsn, "SHOW fsync") == "on"
        assert await execute(server.dsn, "SHOW synchronous_commit") == "on"


async def test_the_environment_of_the_daemon_stays_with_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUD_KEY", "s3cret")
    async with await EmbeddedPostgres.start(tmp_path, durable=False):
        assert "CLOUD_KEY" not in psutil.Process(postmaster_of(tmp_path)).environ()


async def test_data_outlive_a_stop_and_the_address_stays(tmp_path: Path) -> None:
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as first:
        await execute(first.dsn, *KEEP)
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as second:
        assert second.dsn == first.dsn
        assert await execute(second.dsn, READ) == 7


async def test_a_state_folder_too_deep_for_a_socket_works(tmp_path: Path) -> None:
    state_dir = tmp_path.joinpath(*["a-rather-long-folder-name"] * 5)
    async with await EmbeddedPostgres.start(state_dir, durable=False) as server:
        assert await execute(server.dsn, "SELECT 1") == 1
        assert str(state_dir) not in server.dsn


async def test_a_second_daemon_on_the_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    async with daemon(tmp_path) as first:
        dsn = await dsn_of(first)
        with pytest.raises(StateFolderLocked) as refused:
            await EmbeddedPostgres.start(tmp_path)
        assert str(tmp_path) in str(refused.value)
        assert str(first.pid) in str(refused.value)
        assert "\n" not in str(refused.value)
        assert await execute(dsn, "SELECT 1") == 1


async def test_the_server_ends_with_a_daemon_that_was_killed(tmp_path: Path) -> None:
    async with daemon(tmp_path) as process:
        await dsn_of(process)
        assert servers(tmp_path)
        await kill(process)
        await eventually(lambda: not servers(tmp_path))


async def test_start_works_at_once_after_the_daemon_was_killed(tmp_path: Path) -> None:
    async with daemon(tmp_path) as process:
        dsn = await dsn_of(process)
        await execute(dsn, *KEEP)
        idle = await asyncpg.connect(dsn)  # keeps the old server's shutdown busy
        await kill(process)
        async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
            assert await execute(server.dsn, READ) == 7
        idle.terminate()


async def test_start_works_at_once_after_daemon_and_postmaster_were_killed(tmp_path: Path) -> None:
    async with daemon(tmp_path) as process:
        await execute(await dsn_of(process), *KEEP)
        process.send_signal(signal.SIGSTOP)  # it must not restart what is killed
        os.kill(postmaster_of(tmp_path), signal.SIGKILL)
        await kill(process)
        async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
            assert await execute(server.dsn, READ) == 7


async def test_a_predecessor_that_still_runs_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=embedded.__name__)
    async with daemon(tmp_path) as process:
        await execute(await dsn_of(process), *KEEP)
        predecessor = postmaster_of(tmp_path)
        os.kill(predecessor, signal.SIGSTOP)
        await kill(process)
        starting = asyncio.create_task(EmbeddedPostgres.start(tmp_path, durable=False))
        await eventually(lambda: "waiting for an earlier PostgreSQL" in caplog.text)
        assert postmaster_of(tmp_path) == predecessor
        os.kill(predecessor, signal.SIGCONT)
        async with await starting as server:
            assert await execute(server.dsn, READ) == 7


async def test_backends_that_outlive_their_postmaster_are_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=embedded.__name__)
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
        await execute(server.dsn, *KEEP)
        connection = await asyncpg.connect(server.dsn)
        os.kill(backend := connection.get_server_pid(), signal.SIGSTOP)
        os.kill(postmaster_of(tmp_path), signal.SIGKILL)
        await eventually(lambda: "does not start in" in caplog.text)
        assert "still in use" in caplog.text
        os.kill(backend, signal.SIGCONT)
        await answer(server.dsn)
        connection.terminate()


async def test_a_start_waits_for_backends_of_a_killed_daemon_and_postmaster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=embedded.__name__)
    async with daemon(tmp_path) as process:
        dsn = await dsn_of(process)
        await execute(dsn, *KEEP)
        connection = await asyncpg.connect(dsn)
        os.kill(backend := connection.get_server_pid(), signal.SIGSTOP)
        process.send_signal(signal.SIGSTOP)
        os.kill(postmaster_of(tmp_path), signal.SIGKILL)
        await kill(process)
        starting = asyncio.create_task(EmbeddedPostgres.start(tmp_path, durable=False))
        await eventually(lambda: "still in use" in caplog.text)
        os.kill(backend, signal.SIGCONT)
        async with await starting as server:
            assert await execute(server.dsn, READ) == 7
        connection.terminate()


@pytest.mark.parametrize("kind", ["stranger", "zombie"])
async def test_a_stale_lock_file_that_names_a_living_pid_does_not_stop_a_start(tmp_path: Path, kind: str) -> None:
    """A stale lock file exists after a container's restart, where small PIDs recur, or if PID 1 does not reap."""
    async with daemon(tmp_path) as process:
        await execute(await dsn_of(process), *KEEP)
        process.send_signal(signal.SIGSTOP)
        os.kill(postmaster_of(tmp_path), signal.SIGKILL)
        await kill(process)
    with somebody("sleep", "1000" if kind == "stranger" else "0") as pid:
        if kind == "zombie":
            await eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        lock_file = data_of(tmp_path) / "postmaster.pid"
        lock_file.write_text("\n".join([str(pid), *lock_file.read_text().split("\n")[1:]]))
        async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
            assert await execute(server.dsn, READ) == 7


async def test_start_works_after_a_kill_in_the_middle_of_the_first_start(tmp_path: Path) -> None:
    async with daemon(tmp_path) as process:
        await eventually(lambda: any(tmp_path.glob("postgres/initdb-*/PG_VERSION")))
        await kill(process)
        async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
            assert await execute(server.dsn, "SELECT 1") == 1


async def test_a_postmaster_killed_under_a_running_daemon_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
        await execute(server.dsn, *KEEP)
        for _ in range(2):
            killed = postmaster_of(tmp_path)
            with caplog.at_level(logging.ERROR, logger=embedded.__name__):
                os.kill(killed, signal.SIGKILL)
                await eventually(lambda: "starting it again" in caplog.text)
            await answer(server.dsn)
            assert "killed by signal 9" in caplog.text
            assert not psutil.pid_exists(killed), "the killed postmaster was not reaped"
            caplog.clear()
    assert not servers(tmp_path)


async def test_stop_in_the_middle_of_a_restart_leaves_nothing_behind(tmp_path: Path) -> None:
    server = await EmbeddedPostgres.start(tmp_path, durable=False)
    killed = postmaster_of(tmp_path)
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: not psutil.pid_exists(killed))
    await server.stop()
    await eventually(lambda: not servers(tmp_path))
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as again:
        assert await execute(again.dsn, "SELECT 1") == 1


async def test_a_server_that_cannot_start_says_why_and_frees_the_folder(tmp_path: Path) -> None:
    async with await EmbeddedPostgres.start(tmp_path, durable=False):
        pass
    version = data_of(tmp_path) / "PG_VERSION"
    good = version.read_text()
    version.write_text("9\n")
    with pytest.raises(EmbeddedPostgresError, match=r"does not start .* incompatible with server") as failed:
        await EmbeddedPostgres.start(tmp_path, durable=False)
    assert "\n" not in str(failed.value)
    version.write_text(good)
    async with await EmbeddedPostgres.start(tmp_path, durable=False) as server:
        assert await execute(server.dsn, "SELECT 1") == 1


async def test_a_server_without_its_wal_names_the_fix_and_is_not_made_anew(tmp_path: Path) -> None:
    async with await EmbeddedPostgres.start(tmp_path, durable=False):
        pass
    for segment in (data_of(tmp_path) / "pg_wal").glob("0*"):
        segment.unlink()
    before = sorted(data_of(tmp_path).glob("base/*/*"))
    with pytest.raises(EmbeddedPostgresError, match=r"checkpoint record .*; .* lost or damaged: restore a backup"):
        await EmbeddedPostgres.start(tmp_path, durable=False)
    assert sorted(data_of(tmp_path).glob("base/*/*")) == before


async def test_a_folder_without_the_programs_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUBROKER_PG_BINDIR", str(tmp_path))
    with pytest.raises(BinariesNotFound, match="GPUBROKER_DATABASE_URL") as missing:
        await EmbeddedPostgres.start(tmp_path / "state")
    assert str(tmp_path) in str(missing.value)


async def test_the_programs_of_a_named_folder_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "bin"
    own.mkdir()
    for name in ("initdb", "postgres"):
        (own / name).write_text(f'#!/bin/sh\nexec "{embedded.find_bindir() / name}" "$@"\n')
        (own / name).chmod(0o755)
    monkeypatch.setenv("GPUBROKER_PG_BINDIR", str(own))
    assert embedded.find_bindir() == own
    async with await EmbeddedPostgres.start(tmp_path / "state", durable=False) as server:
        assert await execute(server.dsn, "SELECT 1") == 1


@as_root
async def test_an_ordinary_user_can_run_the_server(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    wrapper = (sys.executable, "-I", "-S", str(EXEC), str(os.getpid()), str(tmp_path))
    async with daemon(tmp_path, *wrapper) as process:
        await execute(await dsn_of(process, uid=65534), *KEEP)


@as_root
async def test_another_users_state_folder_is_refused(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    os.chown(state_dir, 12345, 12345)
    with pytest.raises(EmbeddedPostgresError, match="belongs to user id 12345"):
        await EmbeddedPostgres.start(state_dir)


@as_root
async def test_root_without_a_usable_user_namespace_becomes_nobody_and_back(tmp_path: Path) -> None:
    """A parent folder that only its owner may enter shuts out root without capabilities."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 12345, 12345)
    async with await EmbeddedPostgres.start(home / "state", durable=False) as server:
        await execute(server.dsn, *KEEP)
        postmaster = psutil.Process(postmaster_of(home / "state"))
        assert postmaster.uids().effective == 65534
        assert home.stat().st_mode & 0o777 == 0o700
    os.chown(home, 0, 0)
    async with await EmbeddedPostgres.start(home / "state", durable=False) as server:
        assert await execute(server.dsn, READ) == 7
