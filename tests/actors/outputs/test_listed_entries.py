"""A manifest keeps no entry in memory as an object: a folder and a store of many outputs are no larger processes."""

from __future__ import annotations

import gc
import json
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelpool.actors.outputs.entries import ManifestEntry, parse_entry
from modelpool.actors.outputs.folder import MANIFEST_NAME, OutputFolder
from modelpool.actors.outputs.listed_entries import ListedEntries
from modelpool.actors.outputs.manifest import ReplacedMeanwhile
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.store_manifest import MANIFEST_FOLDER, StoreManifest
from tests.actors.outputs.test_folder import image

FEW, MANY = 200, 1000
#: an entry takes 5 KB as an object
MOST_BYTES = 600


def lines(count: int, folder: Path, begin: int = 0) -> list[bytes]:
    """Lines of outputs, each with its own digest and file."""
    with_one = OutputFolder(folder)
    with_one.write(image())
    fields = json.loads(with_one.manifest_path.read_bytes().splitlines()[0])
    return [
        (json.dumps({**fields, "digest": f"{number:064x}", "file": f"{number:032x}.png"}) + "\n").encode()
        for number in range(begin, begin + count)
    ]


def slope(hold: Callable[[int], object]) -> float:
    """Return the bytes that one more output takes in what `hold` returns for a number of outputs."""
    hold(MANY)  # imports, and tables of the interpreter, such as that of interned names
    used = []
    tracemalloc.start()
    try:
        for count in (FEW, MANY):
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            held = hold(count)
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0] - before)
            del held
    finally:
        tracemalloc.stop()
    return (used[1] - used[0]) / (MANY - FEW)


def test_an_output_takes_little_memory_in_a_folder(tmp_path: Path) -> None:
    written = lines(MANY, tmp_path / "one")

    def hold(count: int) -> Any:
        path = tmp_path / f"{count} of {uuid.uuid4().hex}"
        path.mkdir()
        (path / MANIFEST_NAME).write_bytes(b"".join(written[:count]))
        folder = OutputFolder(path)
        found.append(len(folder.entries()))
        return folder, folder.kept()

    found: list[int] = []
    assert slope(hold) < MOST_BYTES
    assert found == [MANY, FEW, MANY]


def test_an_output_takes_little_memory_in_the_manifest_of_a_store(tmp_path: Path) -> None:
    written = lines(MANY, tmp_path / "one")

    def hold(count: int) -> StoreManifest:
        objects = ObjectPrefix(f"file://{tmp_path / uuid.uuid4().hex}")
        objects.create(f"{MANIFEST_FOLDER}part-000001.jsonl", b"".join(written[:count]))
        manifest = StoreManifest(objects)
        manifest.read()
        assert len(manifest.known()) == count
        return manifest

    assert slope(hold) < MOST_BYTES


def test_entries_are_found_after_another_process_has_replaced_the_manifest(tmp_path: Path) -> None:
    """`repair_manifest` moves lines: what was noted of their places no longer holds."""
    folder = OutputFolder(tmp_path)
    for seed in (1, 2, 3):
        folder.write(image(seed))
    kept = folder.kept()
    keys = [image(seed).key for seed in (1, 2, 3)]
    content = folder.manifest_path.read_bytes().splitlines(keepends=True)
    moved = tmp_path / "moved"
    moved.write_bytes(b"".join([content[2], content[1]]))
    moved.rename(folder.manifest_path)
    assert [kept[key].recipe.seed for key in keys[1:]] == [2, 3]
    assert [entry.recipe.seed for entry in folder.entries()] == [3, 2]
    assert keys[0] in kept  # it was there
    assert kept.get(keys[0]) is None
    assert folder.finished().keys() == set(keys[1:])


def test_a_manifest_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    for seed in (1, 2, 3):
        folder.write(image(seed))
    content = folder.manifest_path.read_bytes().splitlines(keepends=True)
    entries = folder._each_entry()
    first = next(entries)
    moved = tmp_path / "moved"
    moved.write_bytes(b"".join([content[2], content[1]]))
    moved.rename(folder.manifest_path)
    assert [first.recipe.seed, *sorted(entry.recipe.seed for entry in entries)] == [1, 2, 3]
    folder.manifest_path.unlink()
    try:
        list(folder._read_at([0]))
    except ReplacedMeanwhile:
        pass
    else:
        raise AssertionError("a removed manifest was read")


def test_a_file_of_two_outputs_is_found_for_both() -> None:
    """Places of earlier versions have names that were used again."""
    entries: list[ManifestEntry] = []
    listed = ListedEntries(lambda places: (entries[place] for place in places))
    for digest, file in (("a", "x.png"), ("b", "x.png"), ("c", "y.png"), ("b", "z.png")):
        entries.append(entry(digest, file))
        listed.note(entries[-1], len(entries) - 1)
    assert [each.digest for each in listed.with_files({"x.png"})] == ["a"]
    assert [each.digest for each in listed.with_files({"y.png", "z.png", "no.png"})] == ["b", "c"]
    assert [each.digest for each in listed] == ["a", "b", "c"]
    listed.take(["taken.png"])
    cases = {("x.png", "b"): False, ("x.png", "a"): True, ("taken.png", "a"): True, ("free.png", "a"): False}
    assert {case: listed.is_of_another(*case) for case in cases} == cases


def entry(digest: str, file: str) -> ManifestEntry:
    """An entry with these facts."""
    recipe = image().recipe.as_json()
    return parse_entry({"digest": digest, "file": file, "run": 1, "index": 0, "pixels_sha256": "", "recipe": recipe})
