"""Temporary files of atomic writes: none is left by a process that was killed while it wrote, once the place is opened
again, and none of a process that writes is removed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.outputs.atomic_write import TEMPORARY_SUFFIX, temporary_file, write_atomically
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout, declare_layout
from modelpool.actors.outputs.open_outputs import open_outputs
from modelpool.actors.outputs.place_writer import PlaceMark, place_mark
from tests.actors.outputs.test_folder import image
from tests.each_case import each_case

#: kills itself after each of its temporary files was created and before it is renamed, linked or removed
WRITER = """
import os, signal, sys
from pathlib import Path
import modelpool.actors.outputs.atomic_write as atomic_write

create = atomic_write._held_file

class Killed:
    def __init__(self, path):
        self.held = create(path)
    def __enter__(self):
        file = self.held.__enter__()
        file.write(b"half"); file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    def __exit__(self, *error): ...

def arm():
    atomic_write._held_file = Killed

where, what = Path(sys.argv[1]), sys.argv[2]
"""
KILLED = {
    "output": "from tests.actors.outputs.test_folder import image\n"
    "from modelpool.actors.outputs.open_outputs import open_outputs\n"
    "place = open_outputs(where); arm(); place.write(image(seed=2))",
    "mark": "from modelpool.actors.outputs.place_writer import place_mark\narm()\nwith place_mark(where): ...",
    "report": "arm(); atomic_write.write_atomically(where / 'report.html', b'x')",
}
LAYOUTS = {
    "files": OutputLayout(),
    "thumbnails": OutputLayout(thumbnail_pixels=64),
    "shards": OutputLayout(LayoutKind.WEBDATASET, 9),
}


def kill_writer(where: Path, what: str) -> None:
    """Have a real process killed while it writes."""
    ended = subprocess.run([sys.executable, "-c", WRITER + KILLED[what], str(where), what], check=False)
    assert ended.returncode == -signal.SIGKILL, f"{what}: {ended.returncode}"


def partials(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(f"*{TEMPORARY_SUFFIX}") if path.is_file())


@each_case("layout", LAYOUTS)
@each_case("what", KILLED)
def test_whoever_opens_a_place_removes_what_a_killed_process_was_writing(
    tmp_path: Path, layout: str, what: str
) -> None:
    """A mark stayed for a day, and in a place with shards for ever; so did a thumbnail."""
    declare_layout(tmp_path / "out", LAYOUTS[layout])
    open_outputs(tmp_path / "out").write(image(seed=1))
    kill_writer(tmp_path / "out", what)
    assert len(partials(tmp_path)) == 1, "it was killed in between"
    place = open_outputs(tmp_path / "out")
    assert partials(tmp_path) == []
    place.write(image(seed=2))
    assert len(place.kept()) == 2


def test_what_a_process_writes_is_not_removed(tmp_path: Path) -> None:
    """Also not by another process that opens the place; the lock is gone with the block."""
    open_outputs(tmp_path)
    code = "import sys; from modelpool.actors.outputs.open_outputs import open_outputs; open_outputs(sys.argv[1])"
    code = code.replace("(sys.argv[1])", "(__import__('pathlib').Path(sys.argv[1]))")
    with temporary_file(tmp_path / f".report.html{TEMPORARY_SUFFIX}") as file, place_mark(tmp_path) as mark:
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
        assert partials(tmp_path) == sorted([mark.name, Path(file.name).name])
    assert partials(tmp_path) == []


def test_a_temporary_file_is_removed_from_a_folder_that_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark was looked for under the old path, and stayed in the moved folder; so did a file that was written."""
    out, away = tmp_path / "out", tmp_path / "away"
    out.mkdir()
    with place_mark(out) as mark:
        assert isinstance(mark, PlaceMark)
        out.rename(away)
        out.mkdir()
    assert partials(tmp_path) == []
    sync = os.fsync

    def moved(file: int) -> None:
        sync(file)
        out.rename(tmp_path / "away-2")
        out.mkdir()

    monkeypatch.setattr(os, "fsync", moved)
    with pytest.raises(FileNotFoundError):
        write_atomically(out / "a.png", b"content")
    assert partials(tmp_path) == []


def test_a_file_that_another_process_removed_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens the place may take a new file for a leftover, in the moment before its writer holds the lock."""
    import fcntl

    lock, path, removals = fcntl.flock, tmp_path / f".a{TEMPORARY_SUFFIX}", [1, 1]

    def late(file: object, how: int) -> None:
        if removals:
            removals.pop()
            path.unlink()
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with temporary_file(path) as file:
        file.write(b"content")
        file.flush()
        assert path.read_bytes() == b"content"
    assert not path.exists()
    assert not removals


def test_a_file_that_another_process_holds_to_remove_it_is_created_again(tmp_path: Path) -> None:
    """Before: the writer went on with the file that was removed a moment later, and could not rename it."""
    path = tmp_path / f".a{TEMPORARY_SUFFIX}"
    path.touch()
    with path.open("rb+") as remover:
        fcntl.flock(remover, fcntl.LOCK_EX)

        def remove() -> None:
            time.sleep(0.02)
            path.unlink()
            fcntl.flock(remover, fcntl.LOCK_UN)

        thread = threading.Thread(target=remove)
        thread.start()
        with temporary_file(path) as file:
            file.write(b"all")
            file.flush()
            thread.join()
            Path(file.name).replace(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"all"


def test_uploads_of_a_killed_server_are_removed_by_the_next_one(tmp_path: Path) -> None:
    """They were neither counted nor removed."""
    from io import BytesIO

    from PIL import Image

    content = BytesIO()
    Image.new("RGB", (4, 4)).save(content, "PNG")
    Uploads(tmp_path).add("", "a.png", content.getvalue())
    (owner,) = tmp_path.iterdir()
    kill_writer(owner, "report")
    assert len(partials(tmp_path)) == 1
    Uploads(tmp_path).add("", "b.png", content.getvalue())
    assert partials(tmp_path) == []
