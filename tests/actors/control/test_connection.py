"""Drivers name the methods of the controller without importing it: each name is a method that a call awaits."""

from __future__ import annotations

import ast
import inspect

import pytest

from modelpool.actors.control.connection import CONTROLLER
from modelpool.actors.control.controller import Controller
from tests.architecture.source_tree import product_modules


def test_each_method_that_drivers_name_is_one_of_the_controller() -> None:
    named = {
        node.attr
        for module in product_modules("actors")
        if "CONTROLLER" in module.path.read_text(encoding="utf-8")  # most are not worth a parse
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "CONTROLLER"
    }
    assert {"submit", "events", "cancel", "status"} < named
    assert [name for name in sorted(named) if not inspect.iscoroutinefunction(getattr(Controller, name, None))] == []


def test_a_named_method_has_its_name_and_calls_that_method() -> None:
    """Connections send the name, or call it with a controller of the same process."""

    class Desk:
        def pin(self, models: tuple[str, ...], replicas: int) -> tuple[tuple[str, ...], int]:
            return models, replicas

    method = CONTROLLER.pin
    assert method.__name__ == "pin"
    assert method(Desk(), ("shapes",), replicas=2) == (("shapes",), 2)  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(AttributeError):
        CONTROLLER._close  # noqa: B018
