"""One folder for the state of a user and one for caches: which they are, whose they are, and what writes elsewhere."""

from __future__ import annotations

import errno
import os
import platform
import stat
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.user_folders import cache_folder, former_machine_folders, machine_folder, state_folder

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    """A home of its own, and none of the variables."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "MODELPOOL_STATE_DIR", "MODELPOOL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def test_the_variables_name_the_folders_in_their_order_and_relative_ones_do_not_count(tmp_path, monkeypatch) -> None:
    home = tmp_path / "home"
    assert (state_folder(), cache_folder()) == (home / ".local/state/modelpool", home / ".cache/modelpool")
    monkeypatch.setenv("XDG_STATE_HOME", "states")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert (state_folder(), cache_folder()) == (home / ".local/state/modelpool", home / ".cache/modelpool")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert (state_folder(), cache_folder()) == (tmp_path / "states/modelpool", tmp_path / "caches/modelpool")
    monkeypatch.setenv("MODELPOOL_STATE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("MODELPOOL_CACHE_DIR", str(tmp_path / "cached"))
    assert (state_folder(), cache_folder()) == (tmp_path / "mine", tmp_path / "cached")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]  # a question creates nothing


def test_the_folder_of_the_machine_is_the_users_alone_and_apart_from_those_of_other_machines(tmp_path) -> None:
    folder = machine_folder()
    assert folder == tmp_path / "home" / ".local/state/modelpool/machines" / platform.node()
    for each in (folder, folder.parent, folder.parents[1]):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_without_a_home_that_can_be_written_the_temporary_folder_is_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "in the way" / "home"))
    (tmp_path / "in the way").write_text("a file")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert state_folder() == tmp_path / f"modelpool-{os.getuid()}"
    assert cache_folder() == tmp_path / f"modelpool-{os.getuid()}-cache"
    (tmp_path / f"modelpool-{os.getuid()}").write_text("a file")
    with pytest.raises(OutputFailed, match="no writable folder for modelpool's state"):
        state_folder()


def test_a_home_that_must_not_be_entered_is_no_home(tmp_path, monkeypatch) -> None:
    """As with HOME=/root in a container with a process that has another user: every command ended with
    PermissionError."""

    def refuse(path, *args: Any, **kwargs: Any) -> os.stat_result:
        if "/home/" in os.fspath(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return found(path, *args, **kwargs)

    found = os.stat
    monkeypatch.setattr("os.stat", refuse)  # root, who may run the tests, enters every folder
    monkeypatch.setattr("os.access", lambda path, mode: "/home" not in os.fspath(path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert state_folder() == tmp_path / f"modelpool-{os.getuid()}"
    assert former_machine_folders() == ()


def test_a_link_or_a_folder_that_everybody_can_write_in_the_temporary_folder_is_not_ours(tmp_path, monkeypatch) -> None:
    """Another user can link our name to a folder of ours that everybody can write, as Ray's is, and put run files
    there: their addresses would be trusted, and the caches read."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / f"modelpool-{os.getuid()}"
    open_to_all = tmp_path / "ray"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    place.symlink_to(open_to_all)
    assert former_machine_folders() == ()
    monkeypatch.setenv("HOME", str(tmp_path / "in the way" / "home"))
    (tmp_path / "in the way").write_text("a file")
    with pytest.raises(OutputFailed, match="no writable folder"):
        state_folder()
    place.unlink()
    place.mkdir(mode=0o700)
    assert state_folder() == place
    place.chmod(0o777)
    with pytest.raises(OutputFailed, match="no writable folder"):
        state_folder()


def test_folders_of_earlier_versions_are_known_while_they_exist(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert former_machine_folders() == ()
    machine_folder()
    (tmp_path / "runtime" / "modelpool").mkdir(parents=True)
    assert former_machine_folders() == (tmp_path / "runtime" / "modelpool", state_folder())


def test_no_other_module_looks_for_a_place_to_write_to() -> None:
    """`state_folder` and its neighbours are the only code that knows the home and the folders of the user."""
    wanted = ("XDG_", "Path.home(", '".local', '".cache')
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("pool", "scheduler", "actors")
        for path in (ROOT / package).rglob("*.py")
        if any(word in path.read_text() for word in wanted)
    }
    assert found == {"pool/values/core/user_folders.py"}
