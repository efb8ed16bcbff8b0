"""Functions, classes and parameter lists stay small enough to read."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

import pytest

from tests.architecture.source_tree import ROOT, statements, syntax

PACKAGES = ("pool", "scheduler", "actors")
MOST_LINES, MOST_METHODS, MOST_PARAMETERS = 80, 40, 10
#: commands have a parameter for each option
COMMANDS = "actors/cli/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A function, with its lines and parameters, or a class, with its methods."""

    path: str
    name: str
    size: tuple[int, ...]


@cache
def definitions() -> tuple[tuple[Definition, ...], tuple[Definition, ...]]:
    """Every function and every class of the product."""
    functions, classes = [], []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            for node in statements(syntax(path)):
                if isinstance(node, Function):
                    functions.append(Definition(place, node.name, (lines(node), parameters(node))))
                elif isinstance(node, ast.ClassDef):
                    classes.append(Definition(place, node.name, (methods(node),)))
    return tuple(functions), tuple(classes)


def lines(function: Function) -> int:
    """The lines of a function behind its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def parameters(function: Function) -> int:
    """The parameters of a function without `self`."""
    found = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(found) - (found[:1] in (["self"], ["cls"]))


def methods(of: ast.ClassDef) -> int:
    return sum(isinstance(each, Function) for each in of.body)


def test_no_function_is_longer_than_two_screens() -> None:
    functions, _ = definitions()
    assert len(functions) > 5000
    assert [each for each in functions if each.size[0] > MOST_LINES] == []


def test_classes_have_few_methods() -> None:
    _, classes = definitions()
    assert len(classes) > 1000
    assert [each for each in classes if each.size[0] > MOST_METHODS] == []


def test_functions_have_few_parameters() -> None:
    found = [each for each in definitions()[0] if not each.path.startswith(COMMANDS)]
    assert [each for each in found if each.size[1] > MOST_PARAMETERS] == []


@pytest.mark.parametrize(("text", "expected"), [("def f(self, a, *, b): 'x'\n", 2), ("def f(a, /, b): pass", 2)])
def test_parameters_are_counted(text: str, expected: int) -> None:
    (function,) = ast.parse(text).body
    assert isinstance(function, Function)
    assert parameters(function) == expected
