"""Counts agree with their nouns in every message: "1 step", not "1 steps"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.source_tree import ROOT

PACKAGES = ("actors", "pool", "scheduler")
#: a noun in the plural after a value
PLURAL = re.compile(r"^ ((?:[a-z-]+ )?[a-z]{2,}s)\b")
#: words with an s at their end that are no plural
NO_PLURAL = frozenset(
    (
        *("as", "bus", "does", "has", "holds", "is", "its", "lacks", "less", "loads", "needs", "plus", "reads", "runs"),
        *("this", "was"),
    )
)
#: names of values that are counts
COUNT = re.compile(r"(?:^|_)(?:count|total)$")


def is_count(value: ast.expr) -> bool:
    """Whether a value of an f-string is a count, by what it is called."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "len"
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return bool(COUNT.search(name))


def disagreeing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each count that a noun in the plural follows, whatever the count is."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            found = PLURAL.match(str(text.value))
            if found and NO_PLURAL.isdisjoint(found[1].split()) and is_count(value.value):
                yield node.lineno, ast.unparse(value.value) + found[0]


def test_counts_are_formatted_by_counted() -> None:
    """`counted(len(steps), "step")` writes the noun; "1 steps" was in some hundred messages."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            # messages of these are assertions about many
            if "invariants" not in path.name:
                found += [
                    f"{path.relative_to(ROOT)}:{line}: {text}"
                    for line, text in disagreeing(ast.parse(path.read_text()))
                ]
    assert found == [], "write counted(count, noun), from modelpool.pool.values.core.errors:\n" + "\n".join(found)


def test_the_search_finds_what_it_is_for() -> None:
    wrong = 'f"{len(x)} steps"', 'f"{a.job_count} jobs of {b}"', 'f"with {total} entries"', 'f"{len(x)} finished jobs"'
    right = "f\"{counted(len(x), 'step')}\"", 'f"{path} holds x"', 'f"{len(x)} is less"', 'f"{len(x)} of {y}"'
    assert [len(list(disagreeing(ast.parse(text)))) for text in wrong] == [1] * len(wrong)
    assert [len(list(disagreeing(ast.parse(text)))) for text in right] == [0] * len(right)
