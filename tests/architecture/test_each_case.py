"""`each_case`: all cases run, and all that fail are told."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.each_case import each_case


def test_all_cases_run_and_those_that_fail_are_told() -> None:
    ran = []

    @each_case("number, text", [(1, "one"), (2, "two"), pytest.param(3, "three", id="third"), (4, "four")])
    def check(number: int, text: str) -> None:
        ran.append((number, text))
        assert number % 2 == 0, f"{text} is odd"

    with pytest.raises(AssertionError, match="2 of 4 cases failed") as caught:
        check()
    assert ran == [(1, "one"), (2, "two"), (3, "three"), (4, "four")]
    assert "[1-'one'] AssertionError: one is odd" in str(caught.value)
    assert "[third] AssertionError: three is odd" in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)


def test_combinations_fixtures_and_folders(tmp_path: Path) -> None:
    found = []

    @each_case("first", "ab")
    @each_case("second", [1, 2], ids=["one", "two"])
    def check(first: str, tmp_path: Path, second: int, fixture: str) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "left").write_text(first)
        found.append((first, second, fixture))

    assert list(inspect.signature(check).parameters) == ["tmp_path", "fixture"]
    check(tmp_path=tmp_path, fixture="x")
    assert found == [("a", 1, "x"), ("a", 2, "x"), ("b", 1, "x"), ("b", 2, "x")]
    assert not list(tmp_path.iterdir())


def test_a_case_that_is_skipped_fails() -> None:
    @each_case("number", [1, 2])
    def check(number: int) -> None:
        pytest.skip("not here")

    with pytest.raises(AssertionError, match="2 of 2 cases failed"):
        check()


def test_what_cannot_be_cases_is_refused() -> None:
    def check(number: int) -> None: ...

    def patching(number: int, monkeypatch: pytest.MonkeyPatch) -> None: ...

    with pytest.raises(AssertionError, match="no parameters"):
        each_case("nummer", [1])(check)
    with pytest.raises(AssertionError, match="would hold for the next"):
        each_case("number", [1])(patching)
    with pytest.raises(AssertionError, match="no cases"):
        each_case("number", [])
    with pytest.raises(AssertionError, match="has no marks"):
        each_case("number", [pytest.param(1, marks=pytest.mark.slow)])
