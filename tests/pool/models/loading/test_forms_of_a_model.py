"""One model as a file, as files with an index and as PyTorch pickles: found, listed, sized and run the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry.changes import add_location
from modelpool.pool.engine.engine import Engine
from modelpool.pool.values.core.errors import UnknownName, UnsafeFile
from modelpool.pool.weights.quant.file_hash import file_sha256, weights_sha256
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, Pipeline, open_engine

INDEX = "toy.safetensors.index.json"
#: the file of a model by the form that it has
FORMS = {"whole": "toy.safetensors", "sharded": INDEX, "zip": "toy.ckpt", "legacy": "toy.pt"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each form, and one for LoRAs, as a file of safetensors and as a pickle."""
    base = tmp_path_factory.mktemp("forms")
    for form in (*FORMS, "loras"):
        (base / form).mkdir()
    tensors = load_file(write_tiny_checkpoint(base / "whole" / "toy.safetensors"))
    places = {key: f"piece-{number % 3}.safetensors" for number, key in enumerate(sorted(tensors))}
    for name in set(places.values()):
        save_file({key: tensors[key] for key in tensors if places[key] == name}, base / "sharded" / name)
    (base / "sharded" / INDEX).write_text(json.dumps({"weight_map": places}))
    for form in ("zip", "legacy"):
        contents = {"state_dict": tensors, "global_step": 7}
        torch.save(contents, base / form / FORMS[form], _use_new_zipfile_serialization=form == "zip")
    lora = load_file(write_tiny_lora(base / "loras" / "light.safetensors"))
    torch.save(lora, base / "loras" / "pickled.pt")
    return base


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = open_engine("sim", PLENTY_BYTES)
    yield opened
    opened.close()


def catalog_of(models: Path, *forms: str, allow_pickle: bool = False) -> Catalog:
    return Catalog([models / form for form in forms], [models / "loras"], "sim", allow_pickle=allow_pickle)


@pytest.fixture(scope="module")
def plain(models: Path) -> np.ndarray:
    """The image of the whole file."""
    opened = open_engine("sim", PLENTY_BYTES)
    try:
        return Pipeline(opened, catalog_of(models, "whole"), {"light": 0.7}).image()
    finally:
        opened.close()


@pytest.mark.parametrize(("form", "lora"), [("sharded", "light"), ("zip", "pickled"), ("legacy", "light")])
def test_every_form_makes_the_image_of_the_whole_file(
    models: Path, engine: Engine, plain: np.ndarray, form: str, lora: str
) -> None:
    catalog = catalog_of(models, form, allow_pickle=True)
    assert np.array_equal(Pipeline(engine, catalog, {lora: 0.7}).image(), plain)


def test_shards_are_one_model_with_the_hash_of_their_contents(models: Path) -> None:
    catalog, index = catalog_of(models, "sharded"), models / "sharded" / INDEX
    [listed] = catalog.models()
    [whole] = catalog_of(models, "whole").models()
    pieces_bytes = sum(piece.stat().st_size for piece in index.parent.glob("*.safetensors"))
    expected = replace(whole, path=str(index), file_bytes=listed.file_bytes)
    assert listed == expected
    assert pieces_bytes < listed.file_bytes == pieces_bytes + index.stat().st_size
    model = catalog.find_model("toy")
    assert (model.path, model.sha256) == (str(index), weights_sha256(index))
    assert model.sha256 != file_sha256(index), "models that were trained from one another have equal indexes"
    for name in ("toy.safetensors.index.json", str(index), model.sha256[:10]):
        assert catalog.find_model(name) == model, name
    for piece in ("piece-0", "piece-1.safetensors"):
        with pytest.raises(UnknownName):
            catalog.find_model(piece)


def test_a_shard_that_is_changed_makes_another_model(models: Path, tmp_path: Path) -> None:
    for file in (models / "sharded").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    catalog = Catalog([tmp_path], [], "sim")
    before = catalog.find_model("toy")
    piece = tmp_path / "piece-1.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1] + b"\x01")
    after = catalog.find_model("toy")
    assert after.sha256 == weights_sha256(tmp_path / INDEX) != before.sha256


def test_an_index_in_the_cache_of_the_hub_is_run_where_its_parts_are(
    models: Path, tmp_path: Path, engine: Engine, plain: np.ndarray
) -> None:
    """Its name links to a blob called by a hash, beside which there are no parts of those names."""
    revision, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    revision.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted((models / "sharded").iterdir())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (revision / file.name).symlink_to(blobs / f"{number:040x}")
    catalog = Catalog([revision], [models / "loras"], "sim")
    assert catalog.find_model("toy").path == str(revision / INDEX)
    assert np.array_equal(Pipeline(engine, catalog, {"light": 0.7}).image(), plain)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_pickle_that_nobody_allowed_is_listed_with_that_and_not_found(models: Path, form: str) -> None:
    catalog, path = catalog_of(models, form), models / form / FORMS[form]
    [listed] = catalog.models()
    assert (listed.name, listed.path, listed.file_bytes) == ("toy", str(path), path.stat().st_size)
    assert f"{path}: a PyTorch pickle, which can contain code" in listed.problem
    for name in ("toy", str(path)):
        with pytest.raises(UnsafeFile, match="or allow_pickle for files"):
            catalog.find_model(name)
    with pytest.raises(UnsafeFile, match="allow_pickle"):
        add_location(catalog.registry, path)
    with pytest.raises(UnsafeFile, match=r"pickled\.pt: a PyTorch pickle"):
        catalog.find_lora("pickled", 1.0)
    allowed = catalog_of(models, form, allow_pickle=True)
    assert allowed.find_model("toy").sha256 == file_sha256(path)
    [told] = allowed.models()
    assert (told.problem, told.family) == ("", "Stable Diffusion 1")


def test_a_pickle_with_code_in_it_is_refused_where_pickles_are_allowed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, (f"open({str(tmp_path / 'sprung')!r}, 'w')",))

    torch.save({"state_dict": {"w": torch.ones(2)}, "trap": Trap()}, tmp_path / "trap.ckpt")
    catalog = Catalog([tmp_path], [], "sim", allow_pickle=True)
    [listed] = catalog.models()
    assert "no code of it was run" in listed.problem
    with pytest.raises(UnsafeFile, match=r"trap\.ckpt: the pickle .* no code of it was run"):
        catalog.find_model("trap")
    assert not (tmp_path / "sprung").exists()
