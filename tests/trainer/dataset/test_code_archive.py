"""The user's code archive, with the tarfile module of every installed Python."""

import io
import tarfile
from pathlib import Path

import pytest

from trainer.agent.base.prepare import UnusableInput, unpack


@pytest.fixture(params=["with data_filter", "without, as Debian 12's Python"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "without" in request.param:
        monkeypatch.delattr(tarfile, "data_filter")


def archive(folder: Path, **member: object) -> Path:
    path = folder / "code.tar"
    with tarfile.open(path, "w") as tar:
        good = tarfile.TarInfo("src/train.py")
        good.size, good.mode = 5, 0o4777
        tar.addfile(good, io.BytesIO(b"print"))
        if member:
            odd = tarfile.TarInfo()
            for key, value in member.items():
                setattr(odd, key, value)
            tar.addfile(odd)
    return path


def test_files_come_out_without_special_rights(python: None, tmp_path: Path) -> None:
    unpack(archive(tmp_path, name="src/link.py", type=tarfile.SYMTYPE, linkname="train.py"), tmp_path / "out")
    assert (tmp_path / "out/src/link.py").read_text() == "print"
    assert (tmp_path / "out/src/train.py").stat().st_mode & 0o7022 == 0


@pytest.mark.parametrize(
    "member",
    [
        {"name": "../outside"},
        {"name": "link", "type": tarfile.SYMTYPE, "linkname": "../../etc/passwd"},
        {"name": "link", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"name": "hard", "type": tarfile.LNKTYPE, "linkname": "../../x"},
        {"name": "pipe", "type": tarfile.FIFOTYPE},
        {"name": "disk", "type": tarfile.BLKTYPE},
    ],
)
def test_an_entry_outside_the_folder_is_refused(python: None, tmp_path: Path, member: dict[str, object]) -> None:
    with pytest.raises(UnusableInput, match=r"give a plain \.tar"):
        unpack(archive(tmp_path, **member), tmp_path / "out")
    assert not (tmp_path / "outside").exists()
