"""The constructors that the build adds to the compiled core (`setup.py`) make what those of the Python core make.

Proves: same arguments, defaults, values and lines, for every dataclass of the core that is not frozen. Found so: the
log of a compiled core did not know the defaults of a constructor with a default that is no literal.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelpool.scheduler.simulator.record.plain_values import _defaults

ROOT = Path(__file__).resolve().parent.parent.parent


@cache
def setup_file() -> Any:
    found = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def with_constructors(path: str, source: str) -> tuple[ModuleType, dict[str, Any]]:
    """The module, and its compiled content."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    built = {"__name__": module.__name__}
    exec(compile(setup_file().with_constructors(source), path, "exec", dont_inherit=True), built)
    return module, built


class Given:
    """An argument, which has whatever a constructor reads of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> str:
        return f"{self.name}.{name}"


def made(kind: type[Any]) -> dict[str, Any]:
    """What an object of a class has in its fields, by what it was given."""
    needed = [one.name for one in inspect.signature(kind).parameters.values() if one.default is inspect.Parameter.empty]
    one = kind(**{name: Given(name) for name in needed})
    values = {field.name: getattr(one, field.name) for field in dataclasses.fields(kind)}
    return {
        name: value.name if isinstance(value, Given) else re.sub(" at 0x[0-9a-f]+", "", repr(value))
        for name, value in values.items()
    }


def test_classes_with_an_added_constructor_make_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    added, left = [], []
    for path in setup_file().compiled_modules():
        source = Path(path).read_text(encoding="utf-8")
        module, built = with_constructors(path, source)
        assert setup_file().with_constructors(source).count("\n") == source.count("\n"), path
        for name, kind in vars(module).items():
            if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or kind.__module__ != module.__name__:
                continue
            if kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                left.append(name)
                continue
            other = built[name]
            assert not other.__dataclass_params__.init, f"{name}: its constructor is not added"
            assert list(inspect.signature(kind).parameters) == list(inspect.signature(other).parameters), name
            assert made(kind) == made(other), name
            assert _defaults(kind) == _defaults(other), f"{name}: the log leaves out others"
            added.append(name)
    assert {"Task", "Job", "RunTask", "Resident", "CostClass", "EvictionHints"} <= set(added)
    assert {"Submitted", "TaskReport"} <= set(left)


def test_a_constructor_takes_the_place_of_a_docstring() -> None:
    source = (
        "@dataclass(slots=True)\n"
        "class A:\n"
        '    """One.\n\n    two\n    """\n\n'
        "    x: Final[int]\n"
        "    y: int = 3  # why\n"
        "    z: list[int] = field(default_factory=list)\n"
        "    s: str = field(repr=False, init=False, default='\u00e9')\n"
        "    n: ClassVar[int] = 1\n"
    )
    assert setup_file().with_constructors(source) == (
        "@dataclass(slots=True, init=False)\n"
        "class A:\n"
        "    def __init__(self, x: int, y: int = 3, z: list[int] | None = None) -> None: "
        "self.x = x; self.y = y; self.z = list() if z is None else z; self.s = '\u00e9'\n\n\n\n\n"
        "    x: Final[int]\n"
        "    y: int  # why\n"
        "    z: list[int]\n"
        "    s: str = field(repr=False)\n"
        "    n: ClassVar[int] = 1\n"
    )
    made_by_lambda = source.replace("default_factory=list", "default_factory=lambda: [1]")
    assert "self.z = (lambda: [1])() if z is None else z" in setup_file().with_constructors(made_by_lambda)
    frozen = source.replace("slots", "frozen")
    assert setup_file().with_constructors(frozen) == frozen
    with pytest.raises(ValueError, match="class A: found no docstring"):
        setup_file().with_constructors("@dataclass\nclass A:\n    x: int\n")
