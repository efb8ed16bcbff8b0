"""Where the files of a pool are unless they are configured elsewhere."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from modelpool.actors.ray.state_folder import journal_path, own_checkpoints, pool_log_path, trace_folder


def test_all_of_them_are_in_the_state_folder_or_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = tmp_path / "modelpool"
    assert journal_path(None, "mine") == state / "mine.journal.sqlite"
    assert own_checkpoints() == state / "checkpoints"
    assert pool_log_path(None, "mine") == state / "machines" / platform.node() / "mine.log"
    assert trace_folder() == state / "machines" / platform.node() / "traces"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert journal_path(Path("~/j"), "mine") == tmp_path / "j"
    assert pool_log_path(Path("~/l"), "mine") == tmp_path / "l"


def test_a_journal_of_an_earlier_version_without_a_home_continues_with_a_line_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_STATE_HOME", "MODELPOOL_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "in the way").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "in the way" / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    state = tmp_path / f"modelpool-{os.getuid()}"
    assert journal_path(None, "mine") == state / "mine.journal.sqlite"
    former = state / "state" / "mine.journal.sqlite"
    former.parent.mkdir(parents=True)
    former.touch()
    assert journal_path(None, "mine") == former
    assert f"{former} is used" in caplog.text
    (state / "mine.journal.sqlite").touch()
    assert journal_path(None, "mine") == state / "mine.journal.sqlite"
