"""Several processes add, hash, alias and remove at once; the result is whole, and nothing was lost."""

from __future__ import annotations

import hashlib
import multiprocessing
import sqlite3
import traceback
import warnings
from pathlib import Path

from modelpool.pool.catalog.registry.changes import add_location, hash_all, remove, set_alias, unhashed
from modelpool.pool.catalog.registry.registry_store import DATABASE_FILE
from tests.pool.catalog.registry.weights import LORA, make_registry, no_wait, write_weights

PROCESSES = 3
FILES = 4


def _work(folder: Path, number: int, barrier: multiprocessing.synchronize.Barrier, results: object) -> None:
    """Add the common folder and one's own, hash all, name files, and remove what was added for a moment."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            registry = make_registry(folder / "state")
            barrier.wait(timeout=60)
            is_first = add_location(registry, folder / "common").is_new
            add_location(registry, folder / f"own{number}")
            add_location(registry, folder / f"fleeting{number}")
            for _ in hash_all(registry, unhashed(registry), wait=no_wait):
                pass
            for file in range(FILES):
                set_alias(registry, f"mine {number} {file}", f"own{number}/file{file}")
                set_alias(registry, "everybodys", f"own{number}/file{file}")
            set_alias(registry, f"fleeting {number}", f"own{number}/file0")
            remove(registry, f"fleeting {number}")
            remove(registry, str(folder / f"fleeting{number}"))
        results.put((number, is_first))  # type: ignore[attr-defined]
    except BaseException:
        results.put((number, traceback.format_exc()))  # type: ignore[attr-defined]


def test_the_end_is_whole(tmp_path: Path) -> None:
    owners = ["common", *(f"own{number}" for number in range(PROCESSES))]
    for owner in owners:
        for file in range(FILES):
            write_weights(tmp_path / owner / f"file{file}.safetensors", LORA, fill=file + 10 * owners.index(owner))
    for number in range(PROCESSES):
        write_weights(tmp_path / f"fleeting{number}" / "gone.safetensors", LORA, fill=200 + number)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    children = [context.Process(target=_work, args=(tmp_path, n, barrier, results)) for n in range(PROCESSES)]
    for child in children:
        child.start()
    said = dict(results.get(timeout=120) for _ in children)
    for child in children:
        child.join()
    assert sorted(said.values()) == [False] * (PROCESSES - 1) + [True], said

    registry = make_registry(tmp_path / "state")
    assert set(registry.store.locations()) == {tmp_path / owner for owner in owners}
    entries = registry.listing().entries
    assert len(entries) == len(owners) * FILES
    for entry in entries:
        assert entry.hashes is not None
        assert entry.hashes.sha256 == hashlib.sha256(entry.file.path.read_bytes()).hexdigest()
        assert entry.hashes.data_sha256
    aliases = {alias.name: alias.path for alias in registry.aliases()}
    shared = aliases.pop("everybodys")
    assert shared in {str(tmp_path / f"own{number}" / f"file{FILES - 1}.safetensors") for number in range(PROCESSES)}
    assert aliases == {
        f"mine {number} {file}": str(tmp_path / f"own{number}" / f"file{file}.safetensors")
        for number in range(PROCESSES)
        for file in range(FILES)
    }
    with sqlite3.connect(tmp_path / "state" / DATABASE_FILE) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
