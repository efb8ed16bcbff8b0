"""Explicit control's promise: what is on the device is what was put there, and the picture does not depend on it.

Proves, on a random model of real layout and the simulated device: moving there and back gives back every byte, figures
returned are what moved, partial moves are whole modules and keep to what was asked, pictures at any residency and with
LoRAs are the pool's own to the byte, a cancel from another thread stops one run, and what is wrong says what to do.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pool
from pool import DoesNotFit, LoadedModel, Stopped, load_checkpoint
from pool.catalog import Catalog
from pool.devices import sim
from pool.errors import AdapterMismatch, CorruptFile, UnknownName, UnusableField
from tests.architecture.source_tree import ROOT
from tests.pool.checkpoints.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, Pipeline, open_engine

PROMPT = {"prompt": "a (red:1.3) circle", "steps": 2, "cfg": 4.0, "sampler": "euler_ancestral", "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    write_tiny_checkpoint(path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    write_tiny_lora(path / "twist.safetensors", 2, text=False)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, np.ndarray]:
    """What the pool's own engine makes of the same request."""
    catalog = Catalog([folder], [folder], "cpu")
    pictures = {}
    for name, loras in (("plain", {}), ("twist", {"twist": 0.8})):
        engine = open_engine("cpu", PLENTY_BYTES)
        pipeline = Pipeline(engine, catalog, loras)
        pictures[name] = pipeline.picture()
        engine.close()
    return pictures


@pytest.fixture
def model(folder: Path) -> Iterator[LoadedModel]:
    with load_checkpoint(folder / "toy.safetensors", device="sim", vram=PLENTY_BYTES) as loaded:
        yield loaded
    assert sim.memory_stats(0).used_bytes == 0


def test_there_and_back_gives_back_every_byte(model: LoadedModel) -> None:
    first_bytes = model.free_bytes()
    size_bytes = sum(component.size_bytes for component in model.components)
    assert model.to_gpu() == size_bytes == model.used_bytes()
    assert model.free_bytes() == first_bytes - size_bytes
    assert model.to_gpu() == 0
    assert model.to_cpu() == size_bytes
    assert model.to_cpu() == 0
    assert (model.free_bytes(), model.used_bytes()) == (first_bytes, 0)


def test_parts_move_as_asked(model: LoadedModel) -> None:
    unet = model.diffusion_model

    @settings(max_examples=15)
    @given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 12 << 20)), max_size=6))
    def check(moves: list[tuple[bool, int]]) -> None:
        unet.to_cpu()
        for loads, size_bytes in moves:
            before_bytes = unet.resident_bytes
            if loads:
                moved_bytes = unet.partially_load(size_bytes)
                assert moved_bytes == unet.resident_bytes - before_bytes
                assert moved_bytes <= size_bytes
            else:
                moved_bytes = unet.partially_unload(size_bytes)
                assert moved_bytes == before_bytes - unet.resident_bytes
                assert moved_bytes >= min(size_bytes, before_bytes)
            assert sim.memory_stats(0).used_bytes == model.used_bytes() == unet.resident_bytes

    check()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0], ids=["resident", "half", "streamed"])
def test_the_picture_is_the_pools_own_at_any_residency(
    model: LoadedModel, expected: dict[str, np.ndarray], share: float
) -> None:
    for component in model.components:
        component.partially_load(int(component.size_bytes * share))
    before_bytes = model.used_bytes()
    assert np.array_equal(model.generate(**PROMPT), expected["plain"])
    assert model.used_bytes() == before_bytes
    assert model.diffusion_model.add_lora(str(folder_of(model) / "twist.safetensors"), 0.8) == 4
    assert np.array_equal(model.generate(**PROMPT), expected["twist"])
    model.diffusion_model.remove_loras()
    assert np.array_equal(model.generate(**PROMPT), expected["plain"])


def folder_of(model: LoadedModel) -> Path:
    return Path(model._model.path).parent


def test_a_cancel_from_another_thread_stops_one_run(model: LoadedModel, expected: dict[str, np.ndarray]) -> None:
    steps: list[int] = []

    def on_step(done: int, _: int) -> None:
        steps.append(done)
        thread = threading.Thread(target=lambda: steps.append(-1) if model.cancel() else None)
        thread.start()
        thread.join()

    with pytest.raises(Stopped):
        model.generate(**PROMPT, on_step=on_step)
    assert steps == [1, -1]
    assert not model.cancel(), "no run is under way"
    assert np.array_equal(model.generate(**PROMPT), expected["plain"])


def test_what_does_not_fit_says_what_to_do(model: LoadedModel) -> None:
    model.diffusion_model.to_gpu()
    used_bytes = model.used_bytes()
    component = model.text_encoder
    sim.occupy(0, model.free_bytes() - component.patcher.use().scratch_bytes - component.size_bytes + 1)
    with pytest.raises(DoesNotFit, match=r"to_cpu\(\), or bring a part with partially_load"):
        model.text_encoder.to_gpu()
    assert 0 < component.partially_load(1 << 40) < component.size_bytes
    used_bytes += component.resident_bytes
    sim.occupy(0, sim.memory_stats(0).foreign_bytes + model.free_bytes())
    with pytest.raises(DoesNotFit, match="of weights are resident; unload"):
        model.encode("x")
    assert model.used_bytes() == used_bytes
    model.diffusion_model.to_cpu()
    sim.occupy(0, 0)
    assert component.to_gpu() > 0
    model.encode("x")


def test_what_is_wrong_is_named(folder: Path, model: LoadedModel) -> None:
    with pytest.raises(UnusableField, match="width: found 65"):
        model.generate("x", width=65)
    with pytest.raises(UnusableField, match="steps: found 0"):
        model.generate("x", steps=0)
    with pytest.raises(UnusableField, match="seed: found -1"):
        model.generate("x", seed=-1)
    with pytest.raises(UnusableField, match="negative: found None"):
        model.sample(model.encode("x"))
    with pytest.raises(UnusableField, match=r"partially_load\(size_bytes\): found -5"):
        model.vae.partially_load(-5)
    with pytest.raises(AdapterMismatch, match="nothing for the text_encoder"):
        model.text_encoder.add_lora(str(folder / "twist.safetensors"))
    with pytest.raises(UnusableField, match="vram: found 0"):
        load_checkpoint(folder / "toy.safetensors", vram=0)
    with pytest.raises(UnknownName, match="device kind"):
        load_checkpoint(folder / "toy.safetensors", device="abacus")
    broken = folder / "broken.safetensors"
    broken.write_bytes(b"not weights")
    with pytest.raises(CorruptFile):
        load_checkpoint(broken, device="sim")
    broken.unlink()
    assert model.used_bytes() == 0


def test_importing_the_package_imports_no_torch_and_every_name_is_there() -> None:
    code = (
        "import sys, pool; assert not {'torch', 'numpy', 'diffusers'} & set(sys.modules); print(*sorted(pool.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == sorted(pool.__all__)
    for name in pool.__all__:
        assert getattr(pool, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pool.nonsense
