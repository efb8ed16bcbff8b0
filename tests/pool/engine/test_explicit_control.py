"""Explicit control's promise: the device has what was put there, and the image does not depend on it.

Proves, on a random model of real layout and the simulated device: moving there and back gives back every byte, figures
returned are what moved, partial moves are whole modules and keep to what was asked, images at any residency and with
LoRAs are the pool's own to the byte, a cancel from another thread stops one run, and what is wrong says what to do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool import pool
from modelpool.pool import DoesNotFit, LoadedModel, ModelClosed, RanOutOfMemory, Stopped, load_checkpoint
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.core.errors import (
    AdapterMismatch,
    CorruptFile,
    UnknownName,
    UnusableField,
    UserError,
    format_bytes,
)
from modelpool.pool.values.core.stage_params import Latent
from tests.architecture.source_tree import ROOT
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
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
    images = {}
    for name, loras in (("plain", {}), ("twist", {"twist": 0.8})):
        engine = open_engine("cpu", PLENTY_BYTES)
        pipeline = Pipeline(engine, catalog, loras)
        images[name] = pipeline.image()
        engine.close()
    return images


@pytest.fixture
def model(folder: Path) -> Iterator[LoadedModel]:
    with load_checkpoint(folder / "toy.safetensors", device="sim", vram=PLENTY_BYTES) as loaded:
        yield loaded
    sim.occupy(0, 0)
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
def test_the_image_is_the_pools_own_at_any_residency(
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
    with pytest.raises(DoesNotFit, match=r"to_cpu\(\), or load a part with partially_load"):
        model.text_encoder.to_gpu()
    assert 0 < component.partially_load(1 << 40) < component.size_bytes
    used_bytes += component.resident_bytes
    sim.occupy(0, sim.memory_stats(0).foreign_bytes + model.free_bytes())
    with pytest.raises(RanOutOfMemory, match=r"of weights are resident; unload .* other programs have taken"):
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


#: a field, and a value of another type or size
WRONG_FIELDS: tuple[tuple[str, object], ...] = (
    ("cfg", float("nan")),
    ("cfg", float("inf")),
    ("cfg", -1),
    ("cfg", 1e30),
    ("cfg", "5"),
    ("steps", 1.5),
    ("steps", True),
    ("steps", 10**6),
    ("width", 64.0),
    ("height", "64"),
    ("height", 10**6),
    ("seed", 1.5),
    ("seed", "a"),
    ("seed", True),
    ("sampler", None),
    ("negative", None),
    ("prompt", None),
)


def test_a_field_of_another_type_is_named_before_anything_runs(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: they hung, raised TypeError or AttributeError, or blamed the model's file."""
    monkeypatch.setattr(model, "_run", lambda *_: pytest.fail("something ran"))

    accepted = []
    for field, wrong in WRONG_FIELDS:
        try:
            model.generate(**{"prompt": "x", field: wrong})  # type: ignore[arg-type]
            accepted.append((field, wrong))
        except UnusableField as problem:
            if not str(problem).startswith(f"{field}: found "):
                accepted.append((field, wrong))
    assert not accepted


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("threads", 0),
        ("threads", 1.5),
        ("vram", 1.5),
        ("vram", True),
        ("vram", "lots"),
        ("device", None),
        ("index", -1),
        ("index", "0"),
        ("path", "gone.safetensors"),
        ("path", None),
        ("path", 7),
        ("path", ""),
    ],
)
def test_a_setting_of_another_type_is_named(folder: Path, field: str, wrong: object) -> None:
    """Found in a review."""
    settings = {"path": folder / "toy.safetensors", "device": "sim", field: wrong}
    with pytest.raises(UnusableField, match=f"^{field}: found "):
        load_checkpoint(**settings)  # type: ignore[arg-type]


def test_stages_and_loras_name_what_they_were_given(folder: Path, model: LoadedModel) -> None:
    with pytest.raises(UnusableField, match="prompt: found 'x', expected a text that `encode` made"):
        model.sample("x", cfg=1)  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match="negative: found 'y'"):
        model.sample(model.encode("x"), "y")  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match=r"latent: found <class 'numpy.ndarray'>, expected .* \[4, height, width\]"):
        model.decode(np.zeros((4, 8, 8), np.float32))  # type: ignore[arg-type]
    for shape in ((3, 8, 8), (8, 8), (1, 4, 8, 8), (4, 0, 8)):
        with pytest.raises(UnusableField, match=re.escape(f"latent: found {shape}")):
            model.decode(Latent(np.zeros(shape, np.float32)))
    with pytest.raises(UnusableField, match="strength: found nan"):
        model.diffusion_model.add_lora(folder / "twist.safetensors", float("nan"))
    with pytest.raises(UnusableField, match="path: found 'gone'"):
        model.diffusion_model.add_lora("gone")
    for method in (model.vae.partially_load, model.vae.partially_unload):
        for size in (1.5, True, None, "lots", -1):
            with pytest.raises(UnusableField, match=rf"{method.__name__}\(size_bytes\): found"):
                method(size)  # type: ignore[arg-type]


def test_numbers_of_numpy_and_sizes_as_texts_are_as_good(model: LoadedModel, expected: dict[str, np.ndarray]) -> None:
    assert 0 < model.vae.partially_load("1MiB") <= 1 << 20
    assert model.vae.partially_unload("1GiB") > 0
    numbers = {"steps": np.int32(2), "cfg": np.float32(4), "seed": np.uint64(7), "width": np.int64(64)}
    assert np.array_equal(model.generate(**{**PROMPT, **numbers}), expected["plain"])


def test_to_gpu_again_moves_nothing_however_little_is_free(model: LoadedModel) -> None:
    """Found in a review: with less free than a layer's scratch, "needs at least 0 B, the budget is 0 B"."""
    model.to_gpu()
    before = [component.resident_bytes for component in model.components]
    sim.occupy(0, sim.memory_stats(0).foreign_bytes + model.free_bytes())
    assert model.to_gpu() == 0
    assert [component.resident_bytes for component in model.components] == before


def test_patches_that_cannot_be_brought_name_the_scratch_they_need(folder: Path, model: LoadedModel) -> None:
    """The other half of the same finding: weights are there, with other patches."""
    unet = model.diffusion_model
    model.to_gpu()
    before_bytes = model.used_bytes()
    unet.add_lora(folder / "twist.safetensors", 0.8)
    scratch_bytes = unet.patcher.use().scratch_bytes
    sim.occupy(0, model.free_bytes() - scratch_bytes + 1)
    with pytest.raises(DoesNotFit, match="largest layer to patch; unload another component") as refused:
        unet.to_gpu()
    assert format_bytes(scratch_bytes) in str(refused.value)
    assert model.used_bytes() == before_bytes
    sim.occupy(0, 0)
    assert unet.to_gpu() == 0
    assert unet.patcher.resident().patch_digest == unet.patcher.patches.digest


def test_a_partial_load_never_makes_anything_leave(model: LoadedModel) -> None:
    """Found in a review: partially_load(0) shrank another component, or this one and returned a negative number."""
    model.diffusion_model.to_gpu()
    model.text_encoder.partially_load(model.text_encoder.size_bytes // 2)
    before = [component.resident_bytes for component in model.components]
    sim.occupy(0, model.free_bytes())  # not even a layer's scratch is left
    for component in model.components:
        assert component.partially_load(0) == 0
        assert component.partially_load(1 << 20) == 0
    assert [component.resident_bytes for component in model.components] == before


def test_advice_of_a_run_that_does_not_fit_is_possible(folder: Path) -> None:
    """Found in a review: "0 B of weights are resident; unload 1.3 MiB of them"."""
    with load_checkpoint(folder / "toy.safetensors", device="sim", vram=3_000_000) as loaded:
        with pytest.raises(DoesNotFit, match=r"\(make a smaller image, or give it more device memory") as refused:
            loaded.encode("x")
        assert "unload" not in str(refused.value)
        assert loaded.vae.partially_load("256KiB") > 0
        with pytest.raises(DoesNotFit, match="is not enough; make a smaller image"):
            loaded.encode("x")


def test_a_closed_model_says_so_and_takes_no_device(folder: Path) -> None:
    """Found in a review: it worked on, and its weights stayed on the device for good."""
    loaded = load_checkpoint(folder / "toy.safetensors", device="sim", vram=PLENTY_BYTES)
    part, encoded = loaded.diffusion_model, loaded.encode("x")
    part.add_lora(folder / "twist.safetensors")
    with pytest.raises(UserError, match="a run is using it"):
        loaded.sample(encoded, cfg=1, steps=2, on_step=lambda done, steps: loaded.close())
    part.to_gpu()
    loaded.close()
    loaded.close()
    assert not loaded.cancel()
    uses = [
        loaded.free_bytes,
        loaded.used_bytes,
        loaded.to_gpu,
        loaded.to_cpu,
        loaded.__enter__,
        lambda: loaded.device_name,
        lambda: loaded.native_size,
        lambda: loaded.encode("x"),
        lambda: loaded.sample(encoded, cfg=1),
        lambda: loaded.decode(Latent(np.zeros((4, 8, 8), np.float32))),
        lambda: loaded.generate("x"),
        lambda: part.size_bytes,
        lambda: part.resident_bytes,
        part.to_gpu,
        part.to_cpu,
        lambda: part.partially_load(1),
        lambda: part.partially_load(0),
        lambda: part.partially_unload(0),
        lambda: part.add_lora(folder / "twist.safetensors"),
        part.remove_loras,
    ]
    for use in uses:
        with pytest.raises(ModelClosed, match="toy: the model is closed; open it again with load_checkpoint"):
            use()
    assert sim.memory_stats(0).used_bytes == 0


def test_importing_the_package_imports_no_torch_and_every_name_is_there() -> None:
    code = (
        "import sys; from modelpool import pool\n"
        "assert not {'torch', 'numpy', 'diffusers'} & set(sys.modules)\n"
        "print(*sorted(pool.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == sorted(pool.__all__)
    for name in pool.__all__:
        assert getattr(pool, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pool.nonsense
