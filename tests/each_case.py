"""Properties of many cases as one test each, which tries all cases and tells all that fail."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Function = Callable[..., None]

#: a message has the errors of so many cases, and the names of the others
MOST_ERRORS = 5


def each_case(
    names: str | tuple[str, ...], values: Iterable[Any], *, ids: Iterable[str] | Callable[[Any], object] | None = None
) -> Callable[[Function], Function]:
    """As `pytest.mark.parametrize`, but one test that runs the cases one after the other.

    Use it for fast cases: a test costs more than such a case, and a property is one test. Each case has a `tmp_path` of
    its own. Other fixtures are shared by the cases, so that they must not change what a case finds. With several of
    these decorators, all combinations are cases.
    """
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    cases = []
    for number, value in enumerate(values):
        marked = value if hasattr(value, "marks") else None  # pytest.param
        found = marked.values if marked else (value if len(names) > 1 else (value,))
        assert not marked or not marked.marks, "a case has no marks: let it be a test"
        assert len(found) == len(names), f"case {number} has {len(found)} values, expected {len(names)}: {names}"
        cases.append((marked.id if marked else None, dict(zip(names, found, strict=True))))
    given = None if ids is None or callable(ids) else list(ids)

    def name_of(number: int) -> str:
        own, values = cases[number]
        if own is not None:
            return str(own)
        if given is not None:
            return given[number]
        if callable(ids):
            return "-".join(str(ids(value)) for value in values.values())
        return "-".join(getattr(value, "__name__", repr(value))[:60] for value in values.values())

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        assert set(names) <= set(parameters), f"{function.__name__} has no parameters {names}"
        assert "monkeypatch" not in parameters, "what a case patches would hold for the next"

        def run_cases(*arguments: Any, **fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            for number, (_, values) in enumerate(cases):
                own = dict(fixtures)
                folder: Path | None = fixtures.get("tmp_path")
                if folder is not None:
                    own["tmp_path"] = folder / f"case_{number}"
                    own["tmp_path"].mkdir()
                try:
                    function(*arguments, **own, **values)
                except (
                    Exception,
                    pytest.fail.Exception,
                    pytest.skip.Exception,
                ) as error:  # a skip would hide the others
                    failed[name_of(number)] = error
                finally:
                    if folder is not None:
                        shutil.rmtree(own["tmp_path"])
            if failed:
                _raise(failed, len(cases))

        rest = [parameter for name, parameter in parameters.items() if name not in names]
        # the marks of the function are in its dictionary
        vars(run_cases).update(vars(function), __signature__=inspect.Signature(rest))
        return functools.update_wrapper(run_cases, function, updated=())

    assert cases, f"no cases of {names}"
    return decorate


def _raise(failed: dict[str, BaseException], count: int) -> None:
    lines = [f"{len(failed)} of {count} cases failed:"]
    for number, (name, error) in enumerate(failed.items()):
        lines.append(f"[{name}] {type(error).__name__}: {error}" if number < MOST_ERRORS else f"[{name}]")
    raise AssertionError("\n".join(lines)) from next(iter(failed.values()))
