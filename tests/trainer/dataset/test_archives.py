"""Archives from untrusted sources are read in place and never trusted."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import digits
from tests.trainer.support.pack import tar
from trainer.dataset import archives, cells
from trainer.dataset.archives import BadArchive
from trainer.dataset.prompts import DataError, row_hash
from trainer.dataset.readers import each_row, read_rows

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


MAKERS: list[Any] = [pytest.param(tar, "tar", id="tar"), pytest.param(zipped, "zip", id="zip")]


@pytest.mark.parametrize(("make", "kind"), MAKERS)
def test_class_folders_are_rows_in_the_order_of_their_names(make: Any, kind: Any, tmp_path: Path) -> None:
    files = {
        "top/b/2.png": PNG + b"2",
        "top/a/1.PNG": PNG,
        "top/a/notes.txt": b"-",
        "top/.x.png": b"",
        "loose.jpg": PNG,
    }
    path = tmp_path / "pictures"
    path.write_bytes(make(files))
    for data in (path, path.read_bytes()):
        rows = list(read_rows(data, kind))
        assert [(r["image"].name, r["label"]) for r in rows] == [
            ("loose.jpg", None), ("top/a/1.PNG", "a"), ("top/b/2.png", "b"),
        ]  # fmt: skip
        assert rows[2]["image"].read() == PNG + b"2"
        assert row_hash({"image": rows[0]["image"]}) == row_hash({"image": rows[1]["image"]})
        assert row_hash({"image": rows[0]["image"]}) != row_hash({"image": rows[2]["image"]})


@pytest.mark.parametrize(("make", "kind"), MAKERS)
@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
def test_a_metadata_file_says_what_each_picture_is(make: Any, kind: Any, table: str) -> None:
    named = [("1.png", "a cat"), ("gone.png", "a dog"), ("../x.png", "out")]
    lines = [f"{f},{t}" for f, t in named] if table.endswith(".csv") else [
        json.dumps({"file_name": f, "text": t}) for f, t in named
    ]  # fmt: skip
    text = "\n".join((["file_name,text"] if table.endswith(".csv") else []) + lines)
    found = list(each_row(make({"x/1.png": PNG, f"x/{table}": text.encode()}), kind, "c.zip"))
    assert isinstance(found[0], dict)
    assert (found[0]["text"], found[0]["image"].name) == ("a cat", "x/1.png")
    assert [str(e).split(":")[0] for e in found[1:]] == [f"c.zip x/{table} row 2", f"c.zip x/{table} row 3"]
    assert "the archive has no 'gone.png'" in str(found[1])


@pytest.mark.parametrize(("make", "kind"), MAKERS)
@pytest.mark.parametrize("name", ["../out.png", "/etc/out.png", "a/../../out.png", "a\\..\\out.png"])
def test_an_entry_outside_the_archive_is_refused(make: Any, kind: str, name: str) -> None:
    with pytest.raises(BadArchive, match="is outside the archive"):
        archives.files(make({"a/1.png": PNG, name: PNG}), kind)


@pytest.mark.parametrize(("make", "kind"), MAKERS)
def test_a_damaged_archive_is_refused_at_every_byte(make: Any, kind: str) -> None:
    """A changed byte leaves a readable archive or raises BadArchive, at the listing or at the first bytes of a file."""
    whole = make({"a/1.png": PNG, "b/2.png": PNG})
    for place in range(len(whole)):
        for value in (0x00, 0x7F, 0xFF):
            try:
                for picture in archives.files(whole[:place] + bytes([value]) + whole[place + 1 :], kind).values():
                    picture.start(16)
            except BadArchive:
                continue


def test_links_in_an_archive_are_not_files() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            entry = tarfile.TarInfo(f"{kind.decode()}.png")
            entry.type, entry.linkname = kind, "/etc/passwd"
            made.addfile(entry)
    assert archives.files(buffer.getvalue(), "tar") == {}
    link = zipfile.ZipInfo("link.png")
    link.external_attr = 0o120777 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert archives.files(buffer.getvalue(), "zip") == {}


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that declares a large size is refused. A file that declares a false size is unpacked up to that size
    only.
    """
    monkeypatch.setattr(archives, "MAX_BYTES", 1000)
    bomb = zipped({"bomb.png": bytes(1_000_000)})
    with pytest.raises(BadArchive, match="has 1000000 bytes, more than 1000"):
        archives.files(bomb, "zip")["bomb.png"].read()
    size = (1_000_000).to_bytes(4, "little")
    lying = bomb.replace(size, (100).to_bytes(4, "little"))
    with pytest.raises(BadArchive, match="cannot be unpacked"):
        archives.files(lying, "zip")["bomb.png"].read()


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"no archive at all", "zip", "is not a .zip that can be read"),
        (b"no archive at all", "tar", "is not a plain .tar"),
        (tar({"1.png": PNG})[:530], "tar", "is not a plain .tar"),
        (zipped({"1.png": PNG})[:-30], "zip", "is not a .zip that can be read"),
        (tar({"readme.txt": b""}), "tar", "has no picture; pack folders of"),
        (tar({"a/metadata.csv": b"", "metadata.jsonl": b""}), "tar", "keep one of them"),
    ],
    ids=["no zip", "no tar", "torn tar", "torn zip", "no picture", "two tables"],  # not by the data: a zip has the time
)
def test_an_unreadable_archive_is_refused_in_one_line(data: bytes, kind: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        list(each_row(data, kind, "d"))
    assert str(caught.value).startswith("d: ")
    assert "\n" not in str(caught.value)


def test_a_damaged_picture_does_not_hide_the_others() -> None:
    data = zipped({"a/1.png": digits.png(next(digits.drawn(1))[1]), "a/2.png": PNG}, zipfile.ZIP_STORED)
    at = data.index(b"IDAT")
    rows = list(read_rows(data[:at] + b"xxxx" + data[at + 4 :], "zip"))
    with pytest.raises(BadArchive, match="cannot be unpacked"):
        rows[0]["image"].read()
    assert rows[1]["image"].read() == PNG


@pytest.mark.parametrize(
    ("cell", "good"),
    [
        ([[0, 255.0], [1, 2]], True),
        ([[[0, 1, 2], [3, 4, 5]]], True),
        ("[[0, 1], [2, 3]]", True),
        ("data:image/png;base64,iVBORw0KGgo=", True),
        ("iVBORw0KGgo=", True),
        ([[0, 256]], False),
        ([[0, 1], [2]], False),
        ([[True]], False),
        ([[[0, 1]]], False),
        ([], False),
        ("[[", False),
        ("iVBORw0KGgo=!", False),
        ("a cat", False),
        ("", False),
        (7, False),
    ],
)
def test_picture_cells_are_recognised(cell: Any, good: bool) -> None:
    assert cells.is_a("picture", cell) == good


def test_a_folder_is_packed_without_what_is_hidden_and_always_alike(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/2.png", ".git/x", "a/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "a/link.png").symlink_to("/etc/passwd")
    data = archives.packed(tmp_path)
    (tmp_path / "a/1.png").touch()
    assert archives.packed(tmp_path) == data
    assert list(archives.files(data, "tar")) == ["a/1.png", "b/2.png"]
