"""Modules of tests that have a simulated device for themselves have different ones."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.architecture.source_tree import ROOT

_INDEX = re.compile(r"^INDEX = (\d+)  # of a (?:simulated )?device that no other test uses$", re.MULTILINE)
_NEXT = re.compile(r"\bINDEX \+ 1\b")


def test_a_device_that_no_other_test_uses_is_named_once() -> None:
    """Found in a review: tensors that one module's tests left would count in another's, by their order."""
    users = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for number in _INDEX.findall(source):
            for index in (int(number), int(number) + 1) if _NEXT.search(source) else (int(number),):
                users[index].append(path.relative_to(ROOT).as_posix())
    assert len(users) > 10
    assert not {index: paths for index, paths in users.items() if len(paths) > 1}
