"""Functions, classes and parameter lists stay small enough to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import ROOT

PACKAGES = ("pool", "scheduler", "actors")
MOST_LINES, MOST_METHODS, MOST_PARAMETERS = 80, 40, 10
#: commands have a parameter for each option
COMMANDS = "actors/cli/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """Every function and class of the product, with its file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, Function | ast.ClassDef):
                    yield path.relative_to(ROOT).as_posix(), node


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
    found = [(path, node.name, lines(node)) for path, node in definitions() if isinstance(node, Function)]
    assert len(found) > 5000
    assert [each for each in found if each[2] > MOST_LINES] == []


def test_classes_have_few_methods() -> None:
    found = {f"{path}:{node.name}": methods(node) for path, node in definitions() if isinstance(node, ast.ClassDef)}
    assert len(found) > 1000
    assert {name: count for name, count in found.items() if count > MOST_METHODS} == {}


def test_functions_have_few_parameters() -> None:
    found = [(f"{path}:{node.name}", parameters(node)) for path, node in definitions() if isinstance(node, Function)]
    found = [each for each in found if not each[0].startswith(COMMANDS)]
    assert [each for each in found if each[1] > MOST_PARAMETERS] == []


@pytest.mark.parametrize(("text", "expected"), [("def f(self, a, *, b): 'x'\n", 2), ("def f(a, /, b): pass", 2)])
def test_parameters_are_counted(text: str, expected: int) -> None:
    (function,) = ast.parse(text).body
    assert isinstance(function, Function)
    assert parameters(function) == expected
