"""A daemon's folders are readable by its user only."""

import logging
import os
import resource
from pathlib import Path

import pytest

from broker.daemon import home_dir as private
from broker.daemon.home_dir import SPOOL, HomeFull, HomeInUse, check_blobs, holding, make_home, with_room
from broker.domain.errors import InvalidInput
from broker.runtime.private_files import write_private


def mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777


def made(folder: Path, bits: int, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    folder.chmod(bits)
    return folder


def refused(home: Path) -> str:
    with pytest.raises(InvalidInput) as error:
        make_home(home)
    (problem,) = error.value.problems
    assert problem.field == "home"
    assert "\n" not in problem.message
    return problem.message


def logged_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of the tested module only: leftovers of other tests are logged at any garbage collection."""
    return [record.message for record in caplog.records if record.name == private.log.name]


def test_a_new_home_is_its_users_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_home(tmp_path / "new")
    assert mode(tmp_path / "new") == 0o700
    make_home(made(tmp_path / "old", 0o700, "stranger"))
    assert not logged_messages(caplog)


FILES = [(), ("lost+found",), ("gpubroker.yaml",), ("installation", "postgres"), ("master.key",)]


@pytest.mark.parametrize("bits", [0o755, 0o775])
@pytest.mark.parametrize("files", FILES)
def test_a_readable_home_is_made_private_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: tuple[str, ...], bits: int
) -> None:
    home = made(tmp_path / "home", bits, *files)
    with caplog.at_level(logging.WARNING):
        make_home(home)
    assert mode(home) == 0o700
    told = f"home {home} had mode {bits:04o}, so others could read keys, database and blobs; it is closed to them now"
    assert logged_messages(caplog) == [told]
    make_home(home)
    assert len(logged_messages(caplog)) == 1


def test_folders_that_are_no_home_or_writable_by_others_are_unchanged(tmp_path: Path) -> None:
    """`--home ~` or `--home /tmp` by mistake must not close those."""
    person = made(tmp_path / "ann", 0o755, "thesis.tex")
    shared = made(tmp_path / "shared", 0o1777, "gpubroker.yaml")
    assert refused(person) == (
        f"{person} has mode 0755, so that others can read it; run chmod 700 on it, or name one below"
    )
    assert "has mode 1777, so that others can change it" in refused(shared)
    assert (mode(person), mode(shared)) == (0o755, 0o1777)


def test_a_home_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = made(tmp_path / "home", 0o755)

    def chmod(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", chmod)
    assert "Permission denied" in refused(home)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert f"belongs to user id {home.stat().st_uid}, and this daemon runs as 4711" in refused(home)


def test_a_blob_folder_outside_of_the_home_is_checked_and_never_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home, outside = made(tmp_path / "home", 0o700), made(tmp_path / "blobs", 0o757)
    check_blobs(None, home)
    check_blobs(made(home / "blobs", 0o755), home)  # the home's mode keeps others out
    with pytest.raises(InvalidInput, match=r"blobs: .*/blobs has mode 0757, so that others can change it; run chmod"):
        check_blobs(outside, home)
    assert mode(outside) == 0o757
    outside.chmod(0o755)
    assert not logged_messages(caplog)
    check_blobs(outside, home)
    (line,) = logged_messages(caplog)
    assert "mode 0755, so that others see data and results" in line
    outside.chmod(0o700)
    check_blobs(outside, home)
    check_blobs(tmp_path / "new", home)
    assert mode(tmp_path / "new") == 0o700
    for folder in (home / SPOOL, home / SPOOL / "below"):
        with pytest.raises(InvalidInput, match=r"blobs: .*each start removes the pending uploads"):
            check_blobs(folder, home)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"blobs: .*Not a directory"):
        check_blobs(tmp_path / "file" / "below", home)


def test_a_second_daemon_in_one_home_is_refused_in_one_line(tmp_path: Path) -> None:
    with holding(tmp_path):
        with pytest.raises(HomeInUse) as error, holding(tmp_path):
            pass
        assert f"process {os.getpid()}" in str(error.value)
        assert str(tmp_path) in str(error.value)
    with holding(tmp_path):
        pass


def test_a_start_removes_half_written_files_of_a_killed_daemon(tmp_path: Path) -> None:
    """Copies of keys and tokens, that is; what only looks like them stays."""
    left = ("client.json.0a1b2c3d", "clock.json.12345678", "master.key.ffffffff", "installation.00000000")
    kept = ("client.json", "master.key", "installation", "master.key.backup", "gpubroker.yaml.0a1b2c3d")
    for name in (*left, *kept):
        (tmp_path / name).touch()
    with holding(tmp_path):
        assert {file.name for file in tmp_path.iterdir()} == {*kept, "lock"}


def test_a_full_disk_is_reported_in_one_line_and_leaves_no_draft(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
    try:
        with pytest.raises(HomeFull) as error, with_room(tmp_path):
            write_private(tmp_path / "client.json", b"token")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), with_room(tmp_path):
        (tmp_path / "absent").read_text()
