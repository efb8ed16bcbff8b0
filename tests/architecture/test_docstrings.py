"""Every module, public class and public function has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source_tree import Module, product_modules

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_public_names_have_docstrings() -> None:
    """Functions of one statement need none, nor do methods that another class of the module documents."""
    silent = [f"{m.place}:{line} {name}" for m in product_modules() for line, name in _undocumented(m)]
    assert silent == []


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
