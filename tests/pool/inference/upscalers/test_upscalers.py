"""Upscalers: every key layout in circulation is recognised, and computes what spandrel 0.4.2 computes.

`spandrel.json` has some pixels of each result, and their mean size: spandrel imports torchvision, so it is not
installed here. Proves also: tiles blend to the undivided image; the estimate of memory is what a run takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_keys
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.upscalers.build_upscaler import plan_upscaler
from modelpool.pool.inference.upscalers.upscale import Tiles
from modelpool.pool.values.core.errors import UnknownArchitecture, UnsafeFile
from modelpool.pool.values.core.stage_params import (
    ImagePixels,
    PixelArray,
    Result,
    RunHooks,
    Stopped,
    UpscaleParams,
    VideoFrames,
    batch_key,
    stage_of,
    task_id,
)
from modelpool.pool.values.core.task_inputs import IMAGE
from modelpool.pool.values.specs.spec import TaskSpec
from tests.pool.inference.upscalers.tiny_upscalers import LAYOUTS, picture, tiny_state

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "spandrel.json").read_text())
QUIET = RunHooks(lambda done, steps: None, lambda: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files: safetensors, and pickles as `params_ema` next to `params`, wrapped, and bare."""
    made = tmp_path_factory.mktemp("upscale_models")
    save_file(tiny_state("compact_2x"), made / "compact.safetensors")
    state = tiny_state("realesrgan_2x")
    torch.save({"params": {key: value * 0 for key, value in state.items()}, "params_ema": state}, made / "ema.pth")
    torch.save({"params": tiny_state("esrgan_old_4x")}, made / "params.pth")
    save_file({f"module.{key}": value for key, value in tiny_state("bsrgan_2x").items()}, made / "many.safetensors")
    return made


@pytest.fixture(scope="module")
def catalog(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog((folder,), (), "sim", registry_folder=tmp_path_factory.mktemp("registry"), allow_pickle=True)


@pytest.fixture(scope="module")
def engine() -> Any:
    opened = Engine.open(EngineSettings("sim", 0, 64 << 20, 1, VramPolicy.NORMAL))
    yield opened
    opened.close()


def test_every_layout_is_recognised_and_equals_spandrel() -> None:
    for layout, expected in GOLDEN.items():
        state = tiny_state(layout)
        plan = plan_upscaler({key: tuple(value.shape) for key, value in state.items()})
        assert kind_of_keys(state.keys(), is_diffusion_model=False) is FileKind.UPSCALER, layout
        assert (plan.scale, plan.unused) == (int(layout[-2]), ()), layout
        with torch.no_grad():
            made = plan.build(state)(picture())
        assert list(made.shape[-2:]) == expected["sides"], layout
        places = torch.arange(len(expected["values"])) * 97 % made.numel()
        torch.testing.assert_close(
            made.flatten()[places], torch.tensor(expected["values"]), rtol=0, atol=1e-5, msg=layout
        )
        assert float(made.double().abs().mean()) == pytest.approx(expected["mean"], abs=1e-5), layout
    assert GOLDEN.keys() == LAYOUTS.keys()


def test_files_that_are_no_upscaler_of_ours_are_refused_with_the_reason() -> None:
    state = {key: tuple(value.shape) for key, value in tiny_state("bsrgan_2x").items()}
    for changed, words in (
        ({**state, "conv_first.weight": (8, 1, 3, 3)}, "found 1 input channels, expected 3"),
        ({key: shape for key, shape in state.items() if ".RDB" not in key}, "without residual dense blocks"),
        ({"layers.0.weight": (8, 3, 3, 3)}, "no upscaler that this version runs"),
    ):
        with pytest.raises(UnknownArchitecture, match=words):
            plan_upscaler(changed)
    tensors = tiny_state("bsrgan_2x")
    plan = plan_upscaler(state)
    with pytest.raises(UnknownArchitecture, match=r"HRconv.weight: found \(8, 9, 3, 3\), expected \(8, 8, 3, 3\)"):
        plan.build({**tensors, "HRconv.weight": torch.zeros(8, 9, 3, 3)})


def test_files_are_found_by_name_and_pickles_only_if_they_are_allowed(catalog: Catalog, folder: Path) -> None:
    scales = {name: catalog.upscalers.find(name).scale for name in ("compact", "ema", "params", "many")}
    assert scales == {"compact": 2, "ema": 2, "params": 4, "many": 2}
    careful = Catalog((folder,), (), "sim", registry_folder=folder / "registry")
    assert careful.upscalers.find("compact").sha256 == catalog.upscalers.find("compact").sha256
    with pytest.raises(UnsafeFile, match=r"ema\.pth"):
        careful.upscalers.find("ema")


def test_a_run_equals_the_network_and_needs_the_estimated_memory(catalog: Catalog, engine: Engine) -> None:
    pixels = _pixels(20, 26)
    for name, layout in (("compact", "compact_2x"), ("ema", "realesrgan_2x"), ("params", "esrgan_old_4x")):
        work = _work(catalog, name, pixels)
        made, cost = _run(catalog, engine, work, ImagePixels(pixels))
        assert isinstance(made, ImagePixels)
        state = tiny_state(layout)
        network = plan_upscaler({key: tuple(value.shape) for key, value in state.items()}).build(state)
        with torch.no_grad():
            floats = network(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255)[0]
        expected = floats.clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(made.pixels_HWC, expected)
        estimated = catalog.upscalers.execution_modes(work)[0].activation_bytes
        # the image itself waits on the host
        assert estimated * 0.9 <= cost.working_bytes <= estimated


def test_tiles_blend_to_the_undivided_image(catalog: Catalog, engine: Engine) -> None:
    """Exactly if the context (a quarter of the overlap) is all that the network sees, 4 pixels; of a network that sees
    32, within 2 of 255 levels. With the smallest overlap, the error is far larger."""
    pixels = _pixels(70, 90)
    for name, tile, overlap, tolerance in (("compact", 48, 16, 0), ("params", 64, 32, 2)):
        whole, _ = _run(catalog, engine, _work(catalog, name, pixels), ImagePixels(pixels))
        assert isinstance(whole, ImagePixels)

        def largest_error(shared: int, name: str = name, tile: int = tile, whole: ImagePixels = whole) -> int:
            tiled, _ = _run(catalog, engine, _work(catalog, name, pixels, tile, shared), ImagePixels(pixels))
            assert isinstance(tiled, ImagePixels)
            return int(np.abs(tiled.pixels_HWC.astype(int) - whole.pixels_HWC).max())

        assert largest_error(overlap) <= tolerance < largest_error(1) / 3, name


def test_tiles_of_unshuffled_images_begin_where_the_network_begins() -> None:
    for width, height in ((90, 70), (301, 33), (64, 513)):
        for step in (1, 2, 4):
            tiles = Tiles.of(width, height, 49, 0, step)
            assert not any(n % step for n in (*tiles.overlaps, *tiles.context))
            cut = [(edge, lap) for edge, lap in zip(tiles.edges, tiles.overlaps, strict=True) if lap]
            assert cut
            assert all(edge > lap and not edge % step for edge, lap in cut)
            assert max(tiles.computed) <= 49 + step


def test_less_memory_gives_tiles(catalog: Catalog, engine: Engine) -> None:
    """The plan offers smaller and smaller tiles, each needing less; an engine with little memory uses them."""
    work = _work(catalog, "params", _pixels(300, 400))
    whole, *divided = catalog.upscalers.execution_modes(work)
    assert [mode.tile for mode in divided] == [384, 256, 192, 128, 96, 64]
    needed = [whole.activation_bytes, *(mode.activation_bytes for mode in divided)]
    assert needed == sorted(needed, reverse=True)
    assert all(mode.slowdown >= 1 for mode in divided)
    pixels = _pixels(150, 150)
    work = _work(catalog, "compact", pixels)
    modes = catalog.upscalers.execution_modes(work)
    spec, _ = catalog.upscalers.needs(work)
    small = Engine.open(
        EngineSettings("sim", 1, spec.weight_bytes * 4 + modes[1].activation_bytes, 1, VramPolicy.NORMAL)
    )
    try:
        made, cost = _run(catalog, small, work, ImagePixels(pixels))
    finally:
        small.close()
    assert cost.division is not None
    assert cost.division.tile in [mode.tile for mode in modes]
    assert isinstance(made, ImagePixels)
    assert made.pixels_HWC.shape == (300, 300, 3)


def test_another_scale_a_video_and_a_batch(catalog: Catalog, engine: Engine) -> None:
    pixels = _pixels(12, 16)
    image, _ = _run(catalog, engine, _work(catalog, "compact", pixels), ImagePixels(pixels))
    larger, _ = _run(catalog, engine, _work(catalog, "compact", pixels, size=(40, 30)), ImagePixels(pixels))
    assert isinstance(image, ImagePixels)
    assert isinstance(larger, ImagePixels)
    assert (image.pixels_HWC.shape, larger.pixels_HWC.shape) == ((24, 32, 3), (30, 40, 3))
    frames = np.stack([pixels, 255 - pixels])
    steps: list[tuple[int, int]] = []
    hooks = RunHooks(lambda done, total: steps.append((done, total)), lambda: False)
    work = _work(catalog, "compact", pixels, frames=2)
    video, _ = _run(catalog, engine, work, VideoFrames(frames, 8.0), hooks)
    assert isinstance(video, VideoFrames)
    assert (video.frames_THWC.shape, video.frame_rate, steps) == ((2, 24, 32, 3), 8.0, [(1, 2), (2, 2)])
    np.testing.assert_array_equal(video.frames_THWC[0], image.pixels_HWC)
    with pytest.raises(Stopped):
        _run(catalog, engine, work, VideoFrames(frames, 8.0), RunHooks(lambda done, total: None, lambda: True))


def test_ids_and_batches_follow_from_content_and_sizes(catalog: Catalog) -> None:
    pixels = _pixels(12, 16)
    work, other = _work(catalog, "compact", pixels), _work(catalog, "ema", pixels)
    assert stage_of(work).value == "decode"
    assert task_id(work, {}) != task_id(other, {})
    assert batch_key(work) == batch_key(_work(catalog, "compact", pixels))
    assert batch_key(work) != batch_key(_work(catalog, "compact", pixels, tile=32))


def _pixels(height: int, width: int) -> PixelArray:
    made = picture(height, width)[0].mul(255).round().to(torch.uint8).permute(1, 2, 0)
    pixels: PixelArray = made.contiguous().numpy()
    return pixels


def _work(
    catalog: Catalog,
    name: str,
    pixels: PixelArray,
    tile: int = 0,
    overlap: int = 0,
    frames: int = 0,
    size: tuple[int, int] | None = None,
) -> UpscaleParams:
    upscaler = catalog.upscalers.find(name)
    height, width = pixels.shape[:2]
    width_after, height_after = size or (width * upscaler.scale, height * upscaler.scale)
    return UpscaleParams(upscaler, width, height, width_after, height_after, frames, tile, overlap)


def _run(
    catalog: Catalog, engine: Engine, work: UpscaleParams, image: Result, hooks: RunHooks = QUIET
) -> tuple[Result, Any]:
    whole, *divided = catalog.upscalers.execution_modes(work)
    _, use = catalog.upscalers.needs(work)
    task = TaskSpec(
        task_id(work, {}),
        stage_of(work),
        (use,),
        whole.activation_bytes,
        catalog.upscalers.run_seconds(work),
        divisions=tuple(divided),
        counted_bytes=whole.counted_bytes,
    )
    return engine.run(task, work, {IMAGE: image}, hooks)
