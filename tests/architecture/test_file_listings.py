"""Only the sources of file names list files: everything between them asks a question of `catalog_questions`."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import ROOT

PACKAGES = ("pool", "scheduler", "actors")
LISTS = frozenset({"models", "loras", "file_names"})
#: classes that define one of the lists as a method. May only shrink
CLASSES = {
    "actors/client/client.py:ModelPool",
    "actors/control/file_listings.py:FileListings",
    "pool/catalog/catalog.py:Catalog",
    "pool/catalog/registry/registry.py:Registry",
}


def listing_classes(source: str) -> list[str]:
    """Return the names of the classes of a source that list files by a method."""
    found: list[str] = []
    if not any(f"def {name}(" in source for name in LISTS):  # most sources need no parsing
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            if any(each.name in LISTS and not _is_property(each) for each in methods):
                found.append(node.name)
    return found


def _is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in method.decorator_list)


def test_few_classes_list_files() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in listing_classes(path.read_text())
    }
    assert sorted(found - CLASSES) == [], "ask a question of actors/control/catalog_questions.py"
    assert sorted(CLASSES - found) == [], "no longer one: remove it"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class A:\n    def models(self): ...\n", ["A"]),
        ("class A:\n    async def loras(self): ...\n", ["A"]),
        ("class A:\n    models: tuple[str, ...]\n", []),
        ("class A:\n    @property\n    def loras(self): ...\n", []),
    ],
)
def test_classes_that_list_files_are_found(source: str, expected: list[str]) -> None:
    assert listing_classes(source) == expected
