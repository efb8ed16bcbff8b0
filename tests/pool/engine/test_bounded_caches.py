"""What an engine and a catalog keep open is bounded, and closing it changes no image.

Proves: models beyond the limit are closed with their file mappings once nothing of them is on the device; resident
models stay; LoRA files beyond the limit are unmapped; a model or LoRA that is used again gives the same pixels.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine import engine as engine_module
from modelpool.pool.engine.engine import Engine
from modelpool.pool.models.loading import open_model as open_model_module
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, Pipeline, open_engine

MODELS = ("toy", "toy1", "toy2", "toy3")
LORAS = tuple(f"twist{number}" for number in range(6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(MODELS):
        write_tiny_checkpoint(path / f"{name}.safetensors", seed, metadata={"modelspec.resolution": "64x64"})
    (path / "loras").mkdir()
    for seed, name in enumerate(LORAS):
        write_tiny_lora(path / "loras" / f"{name}.safetensors", seed)
    return path


def image_of(engine: Engine, catalog: Catalog, model: str, **loras: float) -> np.ndarray:
    pipeline = Pipeline(engine, catalog, loras)
    pipeline.model = catalog.find_model(model)
    return pipeline.image()


def mapped_files(folder: Path) -> set[str]:
    """Names of the files below `folder` that this process maps."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[-1]).stem for line in lines if str(folder) in line}


def test_models_beyond_the_limit_are_closed_and_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MODELS_KEPT", 2)
    monkeypatch.setattr("modelpool.pool.catalog.catalog.MODELS_KEPT", 2)
    catalog = Catalog([folder], [folder / "loras"], "sim")
    plenty = open_engine("sim", PLENTY_BYTES)
    expected = {name: image_of(plenty, catalog, name) for name in MODELS}
    assert len(plenty.residency().entries) == 3 * len(MODELS), "a resident model was closed"
    smallest_bytes = Pipeline(plenty, catalog, {}).smallest_bytes()
    plenty.close()
    del plenty

    engine = open_engine("sim", smallest_bytes)
    for name in (*MODELS, *MODELS):
        np.testing.assert_array_equal(image_of(engine, catalog, name), expected[name], err_msg=name)
    resident = {entry.component for entry in engine.residency().entries}
    assert len(mapped_files(folder) & set(MODELS)) <= 2 + len(resident) + 1
    assert len(mapped_files(folder) & set(MODELS)) < len(MODELS)
    engine.close()


def test_lora_files_beyond_the_limit_are_unmapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_model_module, "LORAS_KEPT", 2)
    monkeypatch.setattr(open_model_module, "PATCH_SETS_REMEMBERED", 2)
    catalog = Catalog([folder], [folder / "loras"], "cpu")
    engine = open_engine("cpu", PLENTY_BYTES)
    first = {name: image_of(engine, catalog, "toy", **{name: 0.8}) for name in LORAS}
    assert len({image.tobytes() for image in first.values()}) == len(LORAS), "a LoRA had no effect"
    # of engine and catalog together: two matches and two patch sets each, and the one that the weights carry
    assert len(mapped_files(folder) & set(LORAS)) <= 5
    for name in reversed(LORAS):
        np.testing.assert_array_equal(image_of(engine, catalog, "toy", **{name: 0.8}), first[name], err_msg=name)
    engine.close()


def test_a_clone_of_a_closed_model_and_the_model_opened_again_are_one_component(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone that somebody kept is leased after its model was closed; opening the model again adopts it."""
    monkeypatch.setattr(engine_module, "MODELS_KEPT", 1)
    catalog = Catalog([folder], [folder / "loras"], "sim")
    engine = open_engine("sim", PLENTY_BYTES)
    first, other = (catalog.find_model(name) for name in MODELS[:2])
    kept = engine.patcher(first, Role.VAE)
    engine.patcher(other, Role.VAE)
    assert kept.key not in engine.vram.components, "the model was not closed"
    with engine.ready(kept, 0):
        pass
    again = engine.patcher(first, Role.VAE)
    with engine.ready(again, 0):
        assert again.resident_modules()
    engine.close()


def test_the_models_used_last_stay_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident models do not push out idle ones that were used more recently."""
    monkeypatch.setattr(engine_module, "MODELS_KEPT", 2)
    catalog = Catalog([folder], [folder / "loras"], "sim")
    engine = open_engine("sim", PLENTY_BYTES)
    for name in MODELS[:2]:
        image_of(engine, catalog, name)
    idle = [engine.patcher(catalog.find_model(name), Role.VAE) for name in MODELS[2:]]
    assert all(patcher.key in engine.vram.components for patcher in idle)
    engine.close()
