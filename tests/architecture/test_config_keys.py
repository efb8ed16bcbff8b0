"""Every configuration key is in docs/reference/configuration.md with its default, and no other; the presets load."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.group_sections import GroupSection
from tests.architecture.source_tree import ROOT

PAGE = (ROOT / "docs" / "reference" / "configuration.md").read_text()
PRESETS = sorted((ROOT / "configs").glob("*.toml"))


def told() -> dict[str, dict[str, str]]:
    """Section -> key -> what stands in the default's column."""
    sections = re.split(r"^## \[(\w+)\]$", PAGE, flags=re.MULTILINE)[1:]
    rows = re.compile(r"^\| `(\w+)` \| (.*?) \|", re.MULTILINE)
    return {name: dict(rows.findall(text)) for name, text in zip(sections[::2], sections[1::2], strict=True)}


def defaults() -> dict[str, dict[str, object]]:
    """Section -> key -> default."""
    found: dict[str, dict[str, object]] = {}
    for name in PoolConfig.model_fields:
        section = getattr(PoolConfig(), name)
        found[name] = dataclasses.asdict(section) if dataclasses.is_dataclass(section) else section.model_dump()
    found["autoscaling"] = found["scheduler"].pop("autoscaling")  # tables of their own in the file
    del found["scheduler"]["groups"]
    del found["scheduler"]["max_unavailable_nodes"]  # of [maintenance]
    found["groups"] = {key: () if value == {} else value for key, value in GroupSection().model_dump().items()}
    return found


def test_every_key_is_told_and_no_other() -> None:
    assert {name: set(keys) for name, keys in told().items()} == {name: set(keys) for name, keys in defaults().items()}


def test_told_defaults_are_the_true_ones() -> None:
    """Where the page gives a literal; None and empty folders are told in words."""
    for section, keys in defaults().items():
        for key, default in keys.items():
            text = told()[section][key]
            if text.startswith("`"):
                assert tomllib.loads(f"x = {text.strip('`')}")["x"] == default, f"[{section}] {key}"
            else:
                assert default in (None, ()), f"[{section}] {key} is {default!r} and told as {text!r}"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_the_presets_can_be_read(path: Path) -> None:
    PoolConfig.load(path)


def test_there_are_presets() -> None:
    assert {"laptop.toml", "one_node.toml", "cluster.toml"} <= {path.name for path in PRESETS}
