"""What usual runs leave out (tests/tiers.py): nothing for good, and nothing without a test that stands for it."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT
from tests.tiers import COMPARISONS, FAST, ROTATIONS, is_named, left_out, part_of


class Item(SimpleNamespace):
    """What `left_out` reads of a test."""

    __hash__ = object.__hash__


def item(name: str, *marks: str) -> Any:
    return Item(nodeid=name, get_closest_marker=lambda mark: mark in marks)


CASES = [f"tests/a.py::test_cases[{number}]" for number in range(20)]
PAIR = ["tests/a.py::test_pair[one]", "tests/a.py::test_pair[two]"]
FUNCTIONS = [f"tests/b.py::TestB::test_{number}" for number in range(7)]


def some_tests() -> list[Any]:
    rotating = [item(name, "rotates") for name in (*CASES, *PAIR, *FUNCTIONS, "tests/c.py::test_alone[case]")]
    return [*rotating, item("tests/a.py::test_usual"), item("tests/a.py::test_slow", "nightly")]


@pytest.mark.parametrize("rotation", range(ROTATIONS))
def test_each_rotation_has_its_part_of_each_function_and_file_and_at_least_one_test(rotation: int) -> None:
    ran = names_of(some_tests(), rotation)
    assert len(ran & set(CASES)) in (2, 3)
    assert len(ran & set(PAIR)) == 1
    assert len(ran & set(FUNCTIONS)) in (1, 2)
    assert ran >= {"tests/c.py::test_alone[case]", "tests/a.py::test_usual"}
    assert "tests/a.py::test_slow" not in ran


def test_each_rotation_has_its_part_of_each_file_of_comparisons() -> None:
    """With a case of each function in each rotation, a third more tests ran."""
    tests = [item(f"{COMPARISONS[0]}::test_{number % 9}[{number}]") for number in range(5 * ROTATIONS)]
    ran = [names_of(tests, rotation) for rotation in range(ROTATIONS)]
    assert {len(each) for each in ran} == {5}
    assert set().union(*ran) == {test.nodeid for test in tests}


def test_all_rotations_have_everything_and_no_order_of_tests_matters() -> None:
    tests = some_tests()
    ran = [names_of(tests, rotation) for rotation in range(5, 5 + ROTATIONS)]
    assert set().union(*ran) == {test.nodeid for test in tests} - {"tests/a.py::test_slow"}
    assert ran == [names_of(tests[::-1], rotation) for rotation in range(5, 5 + ROTATIONS)]


def test_long_tests_rotate_together_and_those_with_ray_if_they_are_very_long() -> None:
    tests = [item(f"tests/{name}.py::test_{name}") for name in "abcdefghij"]
    seconds = {test.nodeid: 3.5 for test in tests[1:]}
    with_ray = item("tests/r.py::test_r", "ray")
    seconds[with_ray.nodeid] = 19.0
    ran = [
        {test.nodeid for test in (*tests, with_ray)}
        - {test.nodeid for test in left_out([*tests, with_ray], rotation, seconds)}
        for rotation in range(ROTATIONS)
    ]
    very_long = [item(f"tests/r.py::test_{number}", "ray") for number in range(ROTATIONS)]
    known = {test.nodeid: 21.0 for test in very_long}
    assert all(len(left_out(very_long, rotation, known)) == ROTATIONS - 1 for rotation in range(ROTATIONS))
    always = {tests[0].nodeid, with_ray.nodeid}
    assert all(always <= each and len(each) in (3, 4) for each in ran)
    assert set().union(*ran) == {*seconds, *always}


def test_rotations_of_long_tests_take_equally_long() -> None:
    """Divided by their number, one of five took 18 % longer than another."""
    tests = [item(f"tests/a.py::test_{number}") for number in range(200)]
    seconds = {test.nodeid: 1.1 + number % 37 for number, test in enumerate(tests)}
    sums = [
        sum(seconds[test.nodeid] for test in {*tests} - left_out(tests, rotation, seconds))
        for rotation in range(ROTATIONS)
    ]
    assert sum(sums) == pytest.approx(sum(seconds.values()))
    assert max(sums) < 1.02 * min(sums)


def test_a_loop_tries_each_case_in_one_rotation() -> None:
    tried = [part_of(CASES, rotation) for rotation in range(7, 7 + ROTATIONS)]
    assert sorted(case for part in tried for case in part) == sorted(CASES)
    assert all(tried)


def test_a_test_with_a_loop_runs_in_each_rotation_however_long_it_takes() -> None:
    """Found in a review: long ones ran in one rotation of seven, and always tried the same seventh: the others ran
    in nightly runs alone."""
    tests = [item(f"tests/{name}.py::test_{name}") for name in "abcdefghij"]
    for test in tests:
        test.fixturenames = ("in_rotation",)
    seconds = {test.nodeid: 17.0 for test in tests}
    assert not any(left_out(tests, rotation, seconds) for rotation in range(ROTATIONS))


def names_of(tests: list[Any], rotation: int) -> set[str]:
    out = {test.nodeid for test in left_out(tests, rotation)}
    return {test.nodeid for test in tests} - out


def test_folders_and_files_that_rotate_exist() -> None:
    for each in (*COMPARISONS, *FAST):
        assert (ROOT / each).exists(), each
    assert all(each.startswith(COMPARISONS) for each in FAST)
    comparison = item("tests/pool/families/test_a.py::test_cases[1]")
    assert left_out([comparison, item(comparison.nodeid + "2"), item(FAST[0] + "::test_a")], 0)


def test_a_test_that_the_command_line_names_runs() -> None:
    named = item("tests/a.py::test_slow[one]", "nightly")
    assert is_named(named, ["./tests/a.py::test_slow"])
    assert is_named(named, ["tests/b.py", "tests/a.py::test_slow[one]"])
    assert not is_named(named, ["tests/a.py", "tests/a.py::test_other"])


def test_each_nightly_test_names_a_file_with_a_usual_one() -> None:
    wrong, found = [], 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.nightly" not in text:
            continue
        for call in marks(ast.parse(text)):
            found += 1
            usually = {each.arg: ast.literal_eval(each.value) for each in call.keywords}.get("usually")
            if not (usually and (ROOT / usually).is_file() and has_usual_test(ast.parse((ROOT / usually).read_text()))):
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}: {usually!r} has no test that runs usually")
    assert found
    assert not wrong


def marks(tree: ast.AST) -> list[ast.Call]:
    """The calls of pytest.mark.nightly."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_nightly(node.func)]


def is_nightly(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "nightly"


def has_usual_test(module: ast.Module) -> bool:
    """Whether a function is a test that neither it nor its file marks as nightly."""
    statements = [each for each in module.body if isinstance(each, ast.Assign)]
    if any(marks(each) for each in statements):
        return False
    functions = [each for each in ast.walk(module) if isinstance(each, ast.FunctionDef)]
    return any(
        each.name.startswith("test_") and not any(marks(decorator) for decorator in each.decorator_list)
        for each in functions
    )


def test_the_arguments_of_fast_runs_exist() -> None:
    lines = (ROOT / "tests" / "fast_tests.txt").read_text(encoding="utf-8").splitlines()
    paths = [line.removeprefix("--ignore=") for line in lines if not line.startswith("#")]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
