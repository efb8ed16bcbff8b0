"""Rooms, and the folders in them, import downwards only.

Proves: no two folders import each other, not even for types; every module lies in a folder of the list; a room has few
folders; the name of a file identifies it in its package; a forbidden import would be found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.layers import FOLDERS_IN_ROOM, LAYERS, ROOMS
from tests.architecture.source_tree import ROOT, Module, product_modules


def folder_of(name: str) -> tuple[str, str] | None:
    """Package and folder of a dotted module name: ("pool", "devices/sim") for modelpool.pool.devices.sim.device."""
    parts = name.split(".")
    if parts[0] != "modelpool" or len(parts) < 3 or parts[1] not in LAYERS:
        return None
    folders = ["/".join(parts[2:end]) for end in range(len(parts), 2, -1)]
    found = next((folder for folder in folders if folder in LAYERS[parts[1]]), None)
    return (parts[1], found) if found is not None else None


def upward_imports(modules: Iterable[Module]) -> list[str]:
    """Every import of a folder that comes later in the list."""
    found = []
    for module in modules:
        home = folder_of(module.name)
        if home is None:
            continue
        package, folder = home
        for name in sorted(module.imports):
            there = folder_of(name)
            if there is not None and there[0] == package:
                order = LAYERS[package]
                if order.index(there[1]) > order.index(folder):
                    found.append(f"{module.place} ({folder}) imports {name} ({there[1]})")
    return found


def test_every_module_lies_in_a_folder_of_the_list() -> None:
    strays = [m.place for m in product_modules(*LAYERS) if m.path.name != "__init__.py" and folder_of(m.name) is None]
    assert strays == []
    folders = {(package, folder) for package, order in LAYERS.items() for folder in order}
    for package, folder in folders:
        assert (ROOT / package / folder / "__init__.py").is_file(), f"{package}/{folder} has no __init__.py"
    used = {folder_of(m.name) for m in product_modules(*LAYERS)}
    assert folders <= used, f"empty folders: {folders - used}"


def test_a_room_has_few_folders_and_each_package_few_rooms() -> None:
    many = {
        f"{package}/{room}": inner
        for package, rooms in ROOMS.items()
        for room, order in rooms.items()
        if len(inner := {folder.split("/")[0] for folder in order if folder != "."}) > FOLDERS_IN_ROOM
    }
    assert many == {}
    assert sum(len(rooms) for rooms in ROOMS.values()) <= 24


def test_file_names_are_unique_in_their_package() -> None:
    """A traceback or the tab of an editor identifies the file."""
    homes: dict[tuple[str, str], list[str]] = {}
    for module in product_modules(*LAYERS):
        if module.path.name != "__init__.py":
            homes.setdefault((module.place.split("/")[0], module.path.name), []).append(module.place)
    assert {name: places for (_, name), places in homes.items() if len(places) > 1} == {}


def test_folders_import_only_the_folders_before_them() -> None:
    assert upward_imports(product_modules(*LAYERS)) == []


def test_a_forbidden_import_is_found(tmp_path: Path) -> None:
    class Planted(Module):
        place = "pool/weights/plan/planted.py"
        name = "modelpool.pool.weights.plan.planted"
        imports = frozenset({"modelpool.pool.engine.engine", "modelpool.pool.values.core.errors"})  # type: ignore[assignment]

    assert upward_imports([Planted(tmp_path)]) == [
        "pool/weights/plan/planted.py (weights/plan) imports modelpool.pool.engine.engine (engine)"
    ]


def test_class_names_are_unique() -> None:
    """One name, one concept: no two modules of the product define a class of the same name."""
    homes: dict[str, list[str]] = {}
    for module in product_modules(*LAYERS):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(f"{module.place}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
