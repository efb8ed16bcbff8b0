"""Families of modules without a test of their own: the tables of other tests compare them with their pipelines."""

from __future__ import annotations

import importlib
from pathlib import Path

from modelpool.pool.families import definitions as modules
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.family import Family

HERE = Path(__file__).parent


def modules_with_tests() -> set[str]:
    """The modules that have a test of their name in this folder."""
    return {path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")} - {"definitions"}


def families_in_tables() -> tuple[Family, ...]:
    """The families of all other modules."""
    tested = {
        family.name
        for name in modules_with_tests()
        for family in importlib.import_module(f"{modules.__name__}.{name}").FAMILIES
    }
    return tuple(family for family in defined_families() if family.name not in tested)


def image_families_in_tables() -> dict[str, Family]:
    """The families for images, by name."""
    return {family.name: family for family in families_in_tables() if not _is_for_time(family)}


def video_families_in_tables() -> dict[str, Family]:
    """The families for videos or audio, by name. One of Cosmos makes single frames."""
    return {family.name: family for family in families_in_tables() if _is_for_time(family)}


def _is_for_time(family: Family) -> bool:
    return "3DModel" in family.module or family.sampling.audio is not None
