"""What people add, alias and remove is whole, checked before it is kept, and never touches a file of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.pool.catalog.registry.changes import add_location, hash_all, remove, set_alias, unhashed
from modelpool.pool.catalog.registry.file_purpose import LORAS, MODELS
from modelpool.pool.catalog.registry.folder_scan import ModelLocation
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.catalog.registry.registry_store import Alias, HashRecord, RegistryStore
from modelpool.pool.values.core.errors import CorruptFile, UnknownName, UnusableField, UserError
from tests.pool.catalog.registry.weights import LORA, make_registry, no_wait, write_weights


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return make_registry(tmp_path / "state")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_weights(tmp_path / "models" / "checkpoints" / "base.safetensors")
    write_weights(tmp_path / "models" / "loras" / "light.safetensors", LORA)
    return tmp_path / "models"


def names(registry: Registry) -> list[str]:
    return [entry.name for entry in registry.listing().entries]


def test_a_folder_or_a_file_is_added_once(registry: Registry, base: Path) -> None:
    file = base / "checkpoints" / "base.safetensors"
    assert add_location(registry, file).is_new
    assert not add_location(registry, file).is_new
    assert names(registry) == ["base"]
    added = add_location(registry, base)
    assert (added.is_new, len(added.files)) == (True, 2)
    assert names(registry) == ["base", "light"]
    within = add_location(registry, base / "loras")
    assert (within.is_new, within.within) == (False, base)
    assert registry.store.locations() == (file, base)


def test_relative_paths_are_kept_whole(registry: Registry, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    assert add_location(registry, Path("loras/../loras")).path == base / "loras"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("gone.safetensors", None, "no such file or folder"),
        ("torn.safetensors", b"\x10\0\0\0\0\0\0\0{", "truncated"),
        ("web.safetensors", b"<!DOCTYPE html>", "a web page"),
        ("old.ckpt", b"\x80\x02", "a PyTorch pickle, .* or allow_pickle for files"),
        ("notes.txt", b"hello", "expected a folder, or a file that ends in .safetensors or .sft"),
    ],
)
def test_what_is_wrong_is_not_added(
    registry: Registry, tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        add_location(registry, tmp_path / name)
    assert registry.store.locations() == ()


def test_bad_files_of_a_folder_are_told_and_the_rest_is_used(registry: Registry, base: Path) -> None:
    (base / "checkpoints" / "torn.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    added = add_location(registry, base)
    assert ([file.path.name for file in added.files], [bad.path.name for bad in added.refused]) == (
        ["base.safetensors", "light.safetensors"],
        ["torn.safetensors"],
    )
    assert names(registry) == ["base", "light"]
    assert [refused.path.name for refused in registry.listing().refused] == ["torn.safetensors"]


def test_what_is_removed_is_forgotten_and_its_files_stay(registry: Registry, base: Path) -> None:
    add_location(registry, base)
    assert remove(registry, str(base)) == base
    assert names(registry) == []
    assert (base / "checkpoints" / "base.safetensors").is_file()
    with pytest.raises(UserError, match=r"was not added, so it cannot be removed\. Added: none"):
        remove(registry, str(base))


def test_a_file_that_was_added_by_itself_is_removed_by_name(registry: Registry, base: Path) -> None:
    add_location(registry, base / "checkpoints" / "base.safetensors")
    assert remove(registry, "base") == base / "checkpoints" / "base.safetensors"
    assert registry.store.locations() == ()


def test_a_folder_that_is_gone_can_be_removed(registry: Registry, base: Path, tmp_path: Path) -> None:
    add_location(registry, base)
    base.rename(tmp_path / "moved")
    assert [r.problem for r in registry.listing().refused] == [
        "does not exist; `modelpool models remove` removes it from the registry"
    ]
    assert remove(registry, str(base)) == base


def test_a_file_of_a_folder_cannot_be_removed_by_itself(registry: Registry, base: Path, tmp_path: Path) -> None:
    add_location(registry, base)
    with pytest.raises(UserError, match=f"is in {base}; remove that, or move the file away"):
        remove(registry, "base")
    configured = make_registry(tmp_path / "other", ModelLocation(base))
    with pytest.raises(UserError, match="the configuration names that folder"):
        remove(configured, str(base))


def test_an_alias_is_a_name_in_any_case_until_it_is_removed(registry: Registry, base: Path) -> None:
    add_location(registry, base)
    alias, before = set_alias(registry, "Favourite", "base")
    assert (alias, before) == (Alias("Favourite", path=str(base / "checkpoints" / "base.safetensors")), None)
    assert registry.find("favourite", MODELS).path.stem == "base"
    assert registry.listing().entries[0].aliases == ("Favourite",)
    with pytest.raises(UnknownName, match="'favourite' is a checkpoint, expected a LoRA"):
        registry.find("favourite", LORAS, "LoRA")
    again, before = set_alias(registry, "FAVOURITE", str(base / "loras" / "light.safetensors"))
    assert (before, registry.aliases()) == (alias, (again,))
    assert registry.find("favourite", LORAS).path.stem == "light"
    assert remove(registry, "favourite") == again
    with pytest.raises(UnknownName):
        registry.find("favourite")


def test_an_alias_of_a_hash_follows_the_content_and_one_of_a_path_the_path(registry: Registry, base: Path) -> None:
    add_location(registry, base)
    for _ in hash_all(registry, unhashed(registry), wait=no_wait):
        pass
    old = base / "loras" / "light.safetensors"
    [digest] = [e.hashes.autov2 for e in registry.listing().entries if e.name == "light" and e.hashes is not None]
    set_alias(registry, "by hash", digest)
    set_alias(registry, "by path", "light")
    new = old.rename(base / "loras" / "other name.safetensors")
    for _ in hash_all(registry, unhashed(registry), wait=no_wait):
        pass
    assert registry.find("by hash").path == new
    with pytest.raises(UnknownName, match=r"the alias 'by path' stands for .*light\.safetensors: it is not among"):
        registry.find("by path")


@pytest.mark.parametrize(
    "name", ["", " a", "a ", "-a", "a/b", "a\\b", "a:1", "a\nb", "deadbeef", "a.safetensors", ".."]
)
def test_an_alias_that_would_be_read_as_something_else_is_refused(registry: Registry, base: Path, name: str) -> None:
    add_location(registry, base)
    with pytest.raises(UnusableField, match="alias"):
        set_alias(registry, name, "base")


def test_an_alias_hides_no_file(registry: Registry, base: Path) -> None:
    add_location(registry, base)
    with pytest.raises(UserError, match=r"'LIGHT' is already the name of"):
        set_alias(registry, "LIGHT", "base")
    set_alias(registry, "light", "light")
    set_alias(registry, "late", "light")
    late = write_weights(base / "checkpoints" / "late.safetensors")
    [entry] = [entry for entry in registry.listing().entries if entry.file.path == late]
    assert entry.name == "checkpoints/late", "a name that finds it although the alias goes first"
    assert registry.find(entry.name).path == late


def test_an_alias_needs_a_file_that_is_known(registry: Registry, base: Path, tmp_path: Path) -> None:
    add_location(registry, base)
    stranger = write_weights(tmp_path / "stranger.safetensors")
    with pytest.raises(UserError, match="is in no model folder; add it first: modelpool models add"):
        set_alias(registry, "mine", str(stranger))
    with pytest.raises(UnknownName):
        set_alias(registry, "mine", "nothing")
    assert registry.aliases() == ()


def test_what_cannot_be_read_any_more_is_told_and_the_rest_is_hashed(registry: Registry, base: Path) -> None:
    add_location(registry, base)
    entries = unhashed(registry)
    (base / "checkpoints" / "base.safetensors").unlink()
    done = {entry.name: result for entry, result in hash_all(registry, entries, wait=no_wait)}
    assert isinstance(done["base"], CorruptFile)
    assert not isinstance(done["light"], CorruptFile)


def test_hashes_are_kept_up_to_a_number(registry: Registry, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.pool.catalog.registry.registry_store.MAX_FILES", 3)
    add_location(registry, base)
    [entry, _] = registry.listing().entries
    record = HashRecord(entry.file.fingerprint, registry.hashes(entry.file))
    store = RegistryStore(registry.store.path.parent)
    for number in (1, 2, 3, 1, 4, 5):
        store.save_hashes(f"/{number}", record)
    assert set(store.hashes()) == {"/1", "/4", "/5"}, "written again is new again"


def test_an_alias_of_an_unknown_file_hides_no_model(registry: Registry, base: Path, tmp_path: Path) -> None:
    """A pool of `--pool` has its own folders, and the aliases of the user who started it."""
    add_location(registry, base)
    set_alias(registry, "mine", "base")
    pool_folder = tmp_path / "of the pool"
    own = write_weights(pool_folder / "mine.safetensors")
    remove(registry, str(base))
    pool = Registry(registry.store, [ModelLocation(pool_folder)])
    assert pool.find("mine").path == own
    assert [entry.name for entry in pool.listing().entries] == ["mine"]
    own.unlink()
    with pytest.raises(UnknownName, match=r"the alias 'mine' stands for .*: it is not among the known model files"):
        pool.find("mine")
