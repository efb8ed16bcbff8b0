"""Sizes that force a conversation: a file of 400 lines, a function of 60, a class of 15 public methods (properties,
which stand for fields, left out)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Module, product_modules

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_PUBLIC_METHODS = 15

MODULES = pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.place)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@MODULES
def test_files_functions_and_classes_are_small(module: Module) -> None:
    lines = len(module.path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_FILE_LINES, f"{module.place}: {lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{module.place}:{node.lineno} {node.name}: {length} lines"
        elif isinstance(node, ast.ClassDef):
            public = [n.name for n in node.body if isinstance(n, Function) and _is_method(n)]
            assert len(public) <= MOST_PUBLIC_METHODS, f"{module.place}: {node.name} has {len(public)} public methods"


@MODULES
def test_what_is_public_says_what_it_does(module: Module) -> None:
    """A docstring for every module, public class and public function. What is one statement long says it itself, and
    what another class of the module has under that name has said it there."""
    silent = [f"{module.place}:{line} {name}" for line, name in _undocumented(module)]
    assert not silent, f"no docstring: {silent}"


def _is_method(node: Function) -> bool:
    return not node.name.startswith("_") and not {"property", "cached_property"} & {
        ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list
    }


def _undocumented(module: Module) -> Iterator[tuple[int, str]]:
    if ast.get_docstring(module.tree) is None and module.tree.body:
        yield 1, module.name
    said = {n.name for n in ast.walk(module.tree) if isinstance(n, Function) and ast.get_docstring(n)}
    for line, name in _undocumented_in(module.tree):
        if name not in said:
            yield line, name


def _undocumented_in(owner: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    for node in owner.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None and not _says_itself(node):
                yield node.lineno, node.name
            if isinstance(node, ast.ClassDef):
                yield from _undocumented_in(node)


def _says_itself(node: Function | ast.ClassDef) -> bool:
    """One statement, a protocol's `...` among them."""
    return isinstance(node, Function) and len(node.body) == 1 and not hasattr(node.body[0], "body")
