"""The public names of earlier versions work, and warn with the new name."""

from __future__ import annotations

from typing import Any, cast

import pytest

import modelpool
from modelpool.actors.client.jobs import Jobs


@pytest.mark.parametrize(("old", "new"), [("FilmResult", "VideoResult"), ("SoundResult", "AudioResult")])
def test_an_old_name_of_the_package_is_the_new_class_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"modelpool\.{old} is deprecated; use modelpool\.{new}"):
        found = getattr(modelpool, old)
    assert found is getattr(modelpool, new)
    assert old not in modelpool.__all__
    assert old not in dir(modelpool)


def test_all_public_names_are_sorted_and_can_be_imported() -> None:
    assert modelpool.__all__ == sorted(modelpool.__all__)
    assert all(hasattr(modelpool, name) for name in modelpool.__all__)


@pytest.mark.parametrize(("old", "new"), [("films", "videos"), ("sounds", "audios")])
def test_an_old_method_of_jobs_delegates_and_warns(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(cast(Any, None))
    results = iter(("one", "two"))
    monkeypatch.setattr(jobs, new, lambda: results)
    with pytest.warns(DeprecationWarning, match=rf"Jobs\.{old}\(\) is deprecated; use Jobs\.{new}\(\)"):
        assert getattr(jobs, old)() is results
