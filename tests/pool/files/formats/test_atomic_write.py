"""Folders are there whole or not at all, and only those are replaced with which nothing of anybody's is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool.pool.files.formats.atomic_write import atomic_folder
from modelpool.pool.values.core.errors import FilesWouldBeLost, OutputFailed

INDEX = "index.json"


def strange(folder: Path) -> Iterator[str]:
    """Files that `fill` does not write."""
    yield from (
        name for name in names(folder) if (folder / name).is_file() and Path(name).name not in (INDEX, "weights")
    )


def fill(path: Path, text: str, *, overwrite: bool = False) -> None:
    with atomic_folder(path, strange, overwrite=overwrite) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text(text)
        assert not (path / "part" / "weights").is_file() or (path / "part" / "weights").read_text() != text
        (folder / INDEX).write_text(text)


def fill_half(path: Path, failure: type[BaseException]) -> None:
    with atomic_folder(path, strange, overwrite=True) as folder:
        (folder / "half").write_text("x")
        raise failure


def names(folder: Path) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*"))


def test_a_folder_appears_at_the_end_and_is_replaced_whole(tmp_path: Path) -> None:
    fill(tmp_path / "a", "one")
    assert names(tmp_path) == ["a", "a/index.json", "a/part", "a/part/weights"]
    with pytest.raises(OutputFailed, match="already exists"):
        fill(tmp_path / "a", "two")
    (tmp_path / "a" / "part" / "empty").mkdir()
    fill(tmp_path / "a", "two", overwrite=True)
    assert names(tmp_path) == ["a", "a/index.json", "a/part", "a/part/weights"]
    assert (tmp_path / "a" / INDEX).read_text() == "two"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path / "a", "one")
    before = names(tmp_path)
    for failure in (RuntimeError, KeyboardInterrupt):
        for name in ("a", "new"):
            with pytest.raises(failure):
                fill_half(tmp_path / name, failure)
    assert names(tmp_path) == before


def test_folders_of_other_things_files_and_links_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("cat")
    (tmp_path / "file").write_text("text")
    fill(tmp_path / "a", "one")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = names(tmp_path)
    for name, expected in (("photos", "contains other files"), ("file", "is no folder"), ("link", "is no folder")):
        with pytest.raises(OutputFailed, match=expected):
            fill(tmp_path / name, "two", overwrite=True)
    assert names(tmp_path) == before
    with pytest.raises(FilesWouldBeLost, match="would be lost: cat; expected a new name"):
        fill(tmp_path / "photos", "two", overwrite=True)
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "empty", "two", overwrite=True)
    assert (tmp_path / "empty" / INDEX).read_text() == "two"


def test_a_message_names_the_first_files_and_says_that_there_are_more(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in "abcde":
        (tmp_path / "photos" / name).write_text(name)
    with pytest.raises(FilesWouldBeLost, match="lost: a, b, c, d, e; expected"):
        fill(tmp_path / "photos", "two", overwrite=True)
    (tmp_path / "photos" / "f").write_text("f")
    with pytest.raises(FilesWouldBeLost, match="lost: a, b, c, d, e and more; expected"):
        fill(tmp_path / "photos", "two", overwrite=True)


def test_what_came_while_the_folder_was_written_is_not_lost(tmp_path: Path) -> None:
    fill(tmp_path / "a", "one")

    def fill_again() -> None:
        with atomic_folder(tmp_path / "a", strange, overwrite=True) as folder:
            (folder / INDEX).write_text("two")
            (tmp_path / "a" / "notes").write_text("mine")

    with pytest.raises(FilesWouldBeLost, match="lost: notes"):
        fill_again()
    assert names(tmp_path) == ["a", "a/index.json", "a/notes", "a/part", "a/part/weights"]
    assert (tmp_path / "a" / INDEX).read_text() == "one"


@pytest.mark.parametrize("name", [".", ".."])
def test_the_folder_that_one_stands_in_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It has no name of its own, and the system does not let it be renamed; nothing is left anywhere."""
    here = tmp_path / "around" / "here"
    here.mkdir(parents=True)
    (here / "notes").write_text("mine")
    monkeypatch.chdir(here)
    with pytest.raises(FilesWouldBeLost, match=r"lost: (here/)?notes; expected"):
        fill(Path(name), "two", overwrite=True)
    assert (here / "notes").read_text() == "mine"
    (here / "notes").unlink()
    with pytest.raises(OutputFailed, match="cannot be written"):
        fill(Path(name), "two", overwrite=True)
    assert names(tmp_path) == ["around", "around/here"]
