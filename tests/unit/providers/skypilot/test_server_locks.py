"""Files by which servers and workers are proven to live or to be dead, and that do not pile up."""

import multiprocessing
import os
from pathlib import Path

from providers.skypilot.plugin import server_supervisor as sky_host
from providers.skypilot.plugin.launch_locks import is_launching, launch_lock, remove_stale_launch_files
from providers.skypilot.plugin.shared import LAUNCHING, SERVERS
from providers.skypilot.server_locks import ServerLocks

NAME = "gb-abcd-aaaaaaaaaaaaa"


def servers(state: Path) -> set[str]:
    return {path.name for path in (state / SERVERS).iterdir()}


def test_a_servers_file_goes_with_it_and_its_death_stays_proven(tmp_path: Path) -> None:
    lives = ServerLocks(tmp_path)
    (died, lock), (mine, mine_lock) = lives.new(), lives.new()
    lives.reap(mine)
    assert (lives.is_proven_dead(died), servers(tmp_path)) == (False, {died, mine}), "it lives"
    os.close(lock)
    lives.reap(mine)
    assert (lives.is_proven_dead(died), servers(tmp_path)) == (True, {mine})
    assert ServerLocks(tmp_path).is_proven_dead(died), "the next daemon knows it as well"
    assert not lives.is_proven_dead(mine)
    lives.drop(mine, mine_lock)
    assert (lives.is_proven_dead(mine), servers(tmp_path)) == (True, set())


def test_a_server_of_another_folder_is_never_proven_dead(tmp_path: Path) -> None:
    there, lock = ServerLocks(tmp_path / "there").new()
    os.close(lock)
    assert not ServerLocks(tmp_path / "here").is_proven_dead(there)


def test_a_name_is_locked_while_any_worker_acts_on_it_and_then_gone(tmp_path: Path) -> None:
    assert not is_launching(tmp_path, NAME)
    with launch_lock(tmp_path, NAME):
        with launch_lock(tmp_path, NAME):
            assert is_launching(tmp_path, NAME)
        remove_stale_launch_files(tmp_path)
        assert is_launching(tmp_path, NAME), "the other has ended, and one acts on it yet"
    assert not is_launching(tmp_path, NAME)
    assert list((tmp_path / LAUNCHING).iterdir()) == []


def _act(state: Path, times: int) -> None:
    for _ in range(times):
        with launch_lock(state, NAME):
            if not is_launching(state, NAME):
                raise SystemExit("a worker acts on the name unobserved")


def test_workers_that_come_and_go_at_once_never_lock_a_file_that_is_gone(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_act, args=(tmp_path, 300)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4


def test_the_name_of_a_killed_worker_is_tidied_up(tmp_path: Path) -> None:
    (tmp_path / LAUNCHING).mkdir()
    (tmp_path / LAUNCHING / NAME).touch()
    remove_stale_launch_files(tmp_path)
    assert list((tmp_path / LAUNCHING).iterdir()) == []


def test_the_log_is_kept_within_bounds_and_its_writers_continue(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * sky_host.MAX_LOG_BYTES)
        sky_host.rotate(log)
        assert log.stat().st_size == sky_host.MAX_LOG_BYTES
        writer.write(b"y")
        sky_host.rotate(log)
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "server.log.1").stat().st_size == sky_host.MAX_LOG_BYTES + 1
