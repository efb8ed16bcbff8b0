"""Folders are there whole or not at all, and only folders of our own kind are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool.errors import OutputFailed
from pool.saving.whole_file import whole_folder

INDEX = "index.json"


def fill(path: Path, text: str, *, overwrite: bool = False) -> None:
    with whole_folder(path, overwrite=overwrite, is_ours=INDEX) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text(text)
        assert not (path / "part" / "weights").is_file() or (path / "part" / "weights").read_text() != text
        (folder / INDEX).write_text(text)


def fill_half(path: Path, failure: type[BaseException]) -> None:
    with whole_folder(path, overwrite=True, is_ours=INDEX) as folder:
        (folder / "half").write_text("x")
        raise failure


def names(folder: Path) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*"))


def test_a_folder_appears_at_the_end_and_is_replaced_whole(tmp_path: Path) -> None:
    fill(tmp_path / "a", "one")
    assert names(tmp_path) == ["a", "a/index.json", "a/part", "a/part/weights"]
    with pytest.raises(OutputFailed, match="is there already"):
        fill(tmp_path / "a", "two")
    (tmp_path / "a" / "left").write_text("over")
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
    for name, expected in (("photos", "holds other things"), ("file", "is no folder"), ("link", "is no folder")):
        with pytest.raises(OutputFailed, match=expected):
            fill(tmp_path / name, "two", overwrite=True)
    assert names(tmp_path) == before
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "empty", "two", overwrite=True)
    assert (tmp_path / "empty" / INDEX).read_text() == "two"
