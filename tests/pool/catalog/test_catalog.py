"""The catalog finds files through the registry: a restart hashes nothing again, what comes later is seen, and the names
of `pool.catalog.registry.weight_file_names` are its names."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry import registry as registry_module
from modelpool.pool.catalog.registry.changes import add_location, set_alias
from modelpool.pool.catalog.registry.registry_store import HashRecord
from modelpool.pool.values.core.errors import AmbiguousName, CorruptFile, UnknownArchitecture, UnknownName
from modelpool.pool.values.core.stage_params import ModelRef
from tests.architecture.source_tree import ROOT

SHAPES = ROOT / "examples" / "shapes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    shutil.copy(SHAPES / "models" / "shapes.safetensors", tmp_path / "models")
    return tmp_path / "models"


def catalog_of(folder: Path) -> Catalog:
    return Catalog([folder], [SHAPES / "loras"], "cpu", folder.parent / "state", uses_added=True)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_is_found_by_name_path_alias_and_hash(folder: Path) -> None:
    catalog, path = catalog_of(folder), folder / "shapes.safetensors"
    wanted = ModelRef("shapes", str(path), sha256(path))
    assert catalog.find_model("shapes") == wanted
    set_alias(catalog.registry, "best", "shapes.safetensors")
    for name in ("SHAPES", "models/shapes", "shapes.safetensors", str(path), "Best", wanted.sha256[:10].upper()):
        assert catalog.find_model(name) == wanted, name
    light = catalog.find_lora("light", 0.5)
    assert (light.name, light.sha256, light.strength) == ("light", sha256(SHAPES / "loras" / "light.safetensors"), 0.5)
    with pytest.raises(UnknownName, match="'light' is a LoRA, expected a model"):
        catalog.find_model("light")


def test_a_restart_hashes_nothing_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "shapes.safetensors"
    monkeypatch.setattr(registry_module, "SETTLED_NS", -(10**12))  # as if the file had been there for long
    first = catalog_of(folder).find_model("shapes")
    monkeypatch.setattr(registry_module, "hash_file", lambda *_: pytest.fail("hashes again"))
    assert catalog_of(folder).find_model("shapes") == first
    # the record is believed as long as the file is unchanged: a digest planted in it comes back
    catalog = catalog_of(folder)
    record = catalog.registry.store.hash_record(os.path.realpath(path))
    assert record is not None
    planted = HashRecord(record.fingerprint, type(record.hashes)("ab" * 32))
    catalog.registry.store.save_hashes(os.path.realpath(path), planted)
    assert catalog_of(folder).find_model("shapes").sha256 == "ab" * 32


def test_files_that_come_and_go_are_seen_by_a_catalog_that_is_open(folder: Path, tmp_path: Path) -> None:
    catalog = catalog_of(folder)
    assert [model.name for model in catalog.models()] == ["shapes"]
    later = tmp_path / "later"
    later.mkdir()
    copy = shutil.copy(folder / "shapes.safetensors", later / "more.safetensors")
    add_location(catalog_of(folder).registry, later)
    assert [model.name for model in catalog.models()] == ["more", "shapes"]
    assert catalog.find_model("more").path == str(copy)
    Path(copy).unlink()
    with pytest.raises(UnknownName):
        catalog.find_model("more")


def test_what_people_added_counts_only_where_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    add_location(catalog_of(folder).registry, SHAPES / "models" / "shapes.safetensors")
    without = Catalog([folder], [], "cpu", folder.parent / "state")
    assert [model.path for model in without.models()] == [str(folder / "shapes.safetensors")]


def test_two_files_of_one_name_are_listed_by_names_that_tell_them_apart(folder: Path) -> None:
    (folder / "tuned").mkdir()
    data = bytearray((folder / "shapes.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "tuned" / "shapes.safetensors").write_bytes(data)
    catalog = catalog_of(folder)
    assert [model.name for model in catalog.models()] == ["models/shapes", "tuned/shapes"]
    with pytest.raises(AmbiguousName, match="model 'shapes' can mean 2 files"):
        catalog.find_model("shapes")
    assert catalog.find_model("tuned/shapes").sha256 == hashlib.sha256(data).hexdigest()


def test_a_damaged_file_is_listed_with_its_problem_and_not_found(folder: Path) -> None:
    whole = (folder / "shapes.safetensors").read_bytes()
    (folder / "torn.safetensors").write_bytes(whole[: len(whole) // 2])
    catalog = catalog_of(folder)
    [problem] = [model.problem for model in catalog.models() if model.name == "torn"]
    assert "truncated" in problem
    with pytest.raises(CorruptFile, match=r"torn\.safetensors: truncated"):
        catalog.find_model("torn")


def test_a_folder_of_diffusers_that_does_not_run_is_listed_and_says_so_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "xl" / "transformer").mkdir(parents=True)
    shutil.copy(folder / "shapes.safetensors", folder / "xl" / "transformer" / "diffusion_pytorch_model.safetensors")
    index = '{"_class_name": "NoSuchPipeline", "transformer": ["diffusers", "NoSuchTransformer"]}'
    (folder / "xl" / "model_index.json").write_text(index)
    (folder / "xl" / "transformer" / "config.json").write_text("{}")
    monkeypatch.setattr(registry_module, "hash_file", lambda *_: pytest.fail("reads it"))
    catalog = catalog_of(folder)
    message = "xl: found no known model in the folder 'transformer'"
    assert message in {model.name: model.problem for model in catalog.models()}["xl"]
    with pytest.raises(UnknownArchitecture, match=message):
        catalog.find_model("xl")
