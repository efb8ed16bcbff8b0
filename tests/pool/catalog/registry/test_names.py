"""A file is named by the end of its path; its shortest name means it alone, whatever the others are called."""

from __future__ import annotations

import unicodedata
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.catalog.registry.weight_file_names import SUFFIXES, folded, named, shortest_names, without_suffix

WORDS = st.sampled_from(
    ["base", "Base", "BASE", "sdxl", "v1.5", "x.pt", "caf\u00e9", "cafe\u0301", "a b", "\u00df", "ss"]
)
PATHS = st.builds(
    lambda folders, stem, ending: PurePosixPath("/", *folders, stem + ending),
    st.lists(WORDS, max_size=3),
    WORDS,
    st.sampled_from(SUFFIXES[1:3]),
)


def distinct(paths: list[PurePosixPath]) -> list[PurePosixPath]:
    """Each once; of two that a reader cannot tell apart, composed and decomposed, the first."""
    return list({unicodedata.normalize("NFC", str(path)): path for path in reversed(paths)}.values())


@given(st.lists(PATHS, max_size=12))
def test_the_shortest_name_means_its_file_alone(paths: list[PurePosixPath]) -> None:
    paths = distinct(paths)
    names = shortest_names(paths)
    assert set(names) == set(paths)
    for path, name in names.items():
        assert named(name, paths) == [path]


@given(st.lists(PATHS, min_size=1, max_size=12), st.data())
def test_no_shorter_name_would_do(paths: list[PurePosixPath], data: st.DataObject) -> None:
    paths = distinct(paths)
    path = data.draw(st.sampled_from(paths))
    name = shortest_names(paths)[path]
    if "/" in name.lstrip("/") and name.rpartition("/")[2] == without_suffix(path.name):
        assert len(named(name.partition("/")[2], paths)) > 1


@given(st.lists(PATHS, max_size=12), st.sets(st.sampled_from(["base", "sdxl", "v1.5"])))
def test_a_name_that_is_taken_is_nobodys(paths: list[PurePosixPath], taken: set[str]) -> None:
    """An alias goes before the names of files, so it may be shown for none."""
    for path, name in shortest_names(distinct(paths), taken).items():
        assert folded(name) not in taken or path.parent == PurePosixPath("/")


@given(st.lists(PATHS, max_size=12), PATHS, PATHS)
def test_a_new_file_never_makes_a_name_mean_another_old_one(
    paths: list[PurePosixPath], new: PurePosixPath, asked: PurePosixPath
) -> None:
    """What a name meant it still means, or it is ambiguous, or the new file is written exactly so."""
    paths = [path for path in distinct(paths) if path != new]
    for name in (without_suffix(asked.name), f"{asked.parent.name}/{asked.name}"):
        before, after = named(name, paths), named(name, [*paths, new])
        assert set(after) - {new} <= set(before)
        assert not before or after


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("base", ["/m/sd15/base.safetensors", "/m/sdxl/base.safetensors", "/m/sdxl/base.sft"]),
        ("sdxl/base", ["/m/sdxl/base.safetensors", "/m/sdxl/base.sft"]),
        ("sdxl/base.sft", ["/m/sdxl/base.sft"]),
        ("SD15/BASE", ["/m/sd15/base.safetensors"]),
        ("/m/sd15/base", ["/m/sd15/base.safetensors"]),
        ("./sd15/base", ["/m/sd15/base.safetensors"]),
        ("Other", ["/m/Other.safetensors"]),
        ("other", ["/m/other.safetensors"]),
        ("OTHER", ["/m/Other.safetensors", "/m/other.safetensors"]),
        ("ase", []),
        ("d15/base", []),
        ("x/m/sd15/base", []),
        ("..", []),
        ("", []),
        ("/", []),
    ],
)
def test_names(name: str, meant: list[str]) -> None:
    files = [
        "/m/Other.safetensors", "/m/other.safetensors", "/m/sd15/base.safetensors", "/m/sdxl/base.safetensors",
        "/m/sdxl/base.sft",
    ]  # fmt: skip
    assert [str(path) for path in named(name, map(PurePosixPath, files))] == meant


@pytest.mark.parametrize(
    ("file_name", "stem"),
    [("a.safetensors", "a"), ("v1.5.SafeTensors", "v1.5"), ("a.safetensors.index.json", "a"), ("folder", "folder"),
     (".safetensors", ".safetensors"), ("a.pt.safetensors", "a.pt")],
)  # fmt: skip
def test_only_the_endings_of_weights_are_left_off(file_name: str, stem: str) -> None:
    assert without_suffix(file_name) == stem
