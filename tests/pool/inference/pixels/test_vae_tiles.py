"""VAEs of every kind by tiles: sizes, places and blending fit; nothing is left on the module; little differs.

The zoo's VAEs have random weights and get noise, so that a tile's norms, attention and surroundings matter much more
than with a trained model; they prove that every tile lands where it belongs and that the modules are as before. How
near the pixels are is seen with the shapes example's VAE, which is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples.shapes.drawing import Scene, ShapeInScene, draw
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.pixels.spans import Downscale
from modelpool.pool.inference.pixels.tiled_vae import (
    Tiling,
    decode_latent,
    downscales_of,
    encode_moments,
    latent_of,
    tiled_decode,
    tiled_encode,
)
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import Stopped
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import build
from tests.pool.zoo.autoencoders import AUTOENCODERS

SHAPES = Path(__file__).parents[4] / "examples" / "shapes" / "models" / "shapes.safetensors"
INDEX = 67  # of a simulated device that no other test uses
#: number of dimensions -> latent sizes, and edges of tiles: two or more tiles along each dimension that is tiled
SIZES = {1: (96,), 2: (24, 28), 3: (2, 12, 12)}
EDGES = {1: 40, 2: 16, 3: 8}
#: more than this part of the result's deviation never differed; measured: 0.03 to 0.37
MOST_DIFFERENCE = 0.5


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def opened(family: str) -> tuple[nn.Module, Tensor, int, Callable[[Tensor], Tensor]]:
    """A module of the zoo, pixels it takes, channels of its latents, and how it decodes."""
    case = build(family)
    pixels_BC: Tensor = case.inputs["sample"]
    with torch.no_grad():
        posterior = case.module.encode(pixels_BC, return_dict=False)[0]
    latent_BC = posterior if isinstance(posterior, Tensor) else posterior.mode()
    if "temb" not in case.inputs:
        return case.module, pixels_BC, latent_BC.shape[1], lambda z: decode_latent(case.module, z)
    temb = case.inputs["temb"]
    return case.module, pixels_BC, latent_BC.shape[1], lambda z: case.module.decode(z, temb, return_dict=False)[0]


def difference(found: Tensor, expected: Tensor) -> float:
    """Deviation of the error as a part of the expected deviation, each channel's mean left out: norms of a tile move
    that, and a shift does not."""
    dims = tuple(range(2, expected.ndim))
    return float((found - expected).var(dims).mean().sqrt() / expected.var(dims).mean().sqrt())


def state_of(module: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}": repr(value)
        for path, sub in module.named_modules()
        for name, value in vars(sub).items()
        if not isinstance(value, (nn.Module, Tensor)) and not name.startswith(("_parameters", "_buffers", "_modules"))
    }


@pytest.mark.rotates
@pytest.mark.parametrize("family", AUTOENCODERS)
def test_every_tile_lands_where_it_belongs(family: str) -> None:
    """One latent cell to the side would be worse, along every dimension that is tiled, for pixels and for latents."""
    module, pixels_BC, channels, decode_call = opened(family)
    dimensions = pixels_BC.ndim - 2
    downscales = downscales_of(module, dimensions)
    before = state_of(module)
    with torch.no_grad():
        latent_BC = drawn(1, channels, *SIZES[dimensions])
        tiling = Tiling(EDGES[dimensions], EDGES[dimensions] // 2)
        whole, tiled = decode_call(latent_BC), tiled_decode(decode_call, latent_BC, tiling, downscales)
        assert tiled.shape == whole.shape
        assert difference(tiled, whole) < MOST_DIFFERENCE
        for place in range(dimensions == 3, dimensions):
            beside = tiled.roll(downscales[place].factor, dims=2 + place)
            assert difference(tiled, whole) < 0.8 * difference(beside, whole)
        whole_pixels = drawn(1, pixels_BC.shape[1], *whole.shape[2:])
        moments = encode_moments(module, whole_pixels)
        found = tiled_encode(lambda tile: encode_moments(module, tile), whole_pixels, tiling, downscales)
    assert found.shape == moments.shape
    assert difference(found, moments) < MOST_DIFFERENCE
    for place in range(dimensions == 3, dimensions):
        assert difference(found, moments) < 0.8 * difference(found.roll(1, dims=2 + place), moments)
    assert state_of(module) == before


@pytest.mark.rotates
@pytest.mark.parametrize("family", AUTOENCODERS)
def test_one_tile_is_what_the_module_gives_bit_for_bit(family: str) -> None:
    module, pixels_BC, channels, decode_call = opened(family)
    downscales = downscales_of(module, pixels_BC.ndim - 2)
    with torch.no_grad():
        moments = encode_moments(module, pixels_BC)
        latent_BC = drawn(1, channels, *moments.shape[2:])
        for tiling in (Tiling(0), Tiling(64)):
            assert torch.equal(tiled_decode(decode_call, latent_BC, tiling, downscales), decode_call(latent_BC))
            found = tiled_encode(lambda tile: encode_moments(module, tile), pixels_BC, tiling, downscales)
            assert torch.equal(found, moments)


@pytest.mark.parametrize("family", ["vae_hunyuan", "vae_wan", "vae_wan22", "vae_mochi", "vae_cosmos"])
def test_a_video_may_be_cut_in_time_too(family: str) -> None:
    module, _, channels, decode_call = opened(family)
    downscales = downscales_of(module, 3)
    with torch.no_grad():
        latent_BC = drawn(1, channels, 9, 3, 3)
        whole = decode_call(latent_BC)
        tiled = tiled_decode(decode_call, latent_BC, Tiling((6, 0, 0), (3, 0, 0)), downscales)
    first_frames = downscales[0].pixels(6 - 3)
    assert tiled.shape == whole.shape
    # no tile but the first sees the first frames
    torch.testing.assert_close(tiled[:, :, :first_frames], whole[:, :, :first_frames], rtol=1e-4, atol=1e-4)
    assert difference(tiled, whole) < 0.8 * difference(tiled.roll(1, dims=2), whole)


@pytest.mark.parametrize("family", ["vae_wan", "vae_qwen"])
def test_a_call_that_is_stopped_midway_leaves_nothing_on_the_device(family: str) -> None:
    """These keep the ends of chunks on themselves while they go over the frames."""
    module, _, channels, decode_call = opened(family)
    sim.configure(INDEX, 256 << 20)
    device = torch.device("sim", INDEX)
    swap_to_casting(module)
    layers = 0

    def interrupt() -> None:
        nonlocal layers
        layers += 1
        if layers == 60:
            raise Stopped

    latent_BC = drawn(1, channels, 3, 4, 4)
    with torch.no_grad(), compute(torch.device("cpu"), torch.float32):
        expected = decode_call(latent_BC)
    used_bytes = sim.memory_stats(INDEX).used_bytes
    with torch.no_grad(), compute(device, torch.float32, interrupt), pytest.raises(Stopped):
        decode_call(latent_BC.to(device))
    assert sim.memory_stats(INDEX).used_bytes == used_bytes
    with torch.no_grad(), compute(device, torch.float32):
        assert torch.equal(decode_call(latent_BC.to(device)).cpu(), expected)


def test_an_autoencoder_that_does_not_say_how_it_divides_is_refused() -> None:
    module, _, _, _ = opened("vae")
    with pytest.raises(UnusableField, match=r"VAE: .*AutoencoderKL"):
        downscales_of(module, 1)


@pytest.mark.parametrize(("sizes", "refused"), [((64, 64), False), ((64, 60), True), ((0, 64), True)])
def test_pixels_that_are_no_whole_number_of_cells_are_refused(sizes: tuple[int, int], refused: bool) -> None:
    downscales = (Downscale(8),) * 2
    call = torch.nn.AvgPool2d(8)
    if refused:
        with pytest.raises(UnusableField, match=r"size of the pixels.*multiples of 8"):
            tiled_encode(call, torch.zeros(1, 3, *sizes), Tiling(4), downscales)
    else:
        assert tiled_encode(call, torch.zeros(1, 3, *sizes), Tiling(4), downscales).shape == (1, 3, 8, 8)


def test_a_tile_for_too_few_dimensions_is_refused() -> None:
    with pytest.raises(UnusableField, match=r"tile: .*3 numbers"):
        tiled_decode(torch.cos, torch.zeros(1, 3, 4, 8, 8), Tiling((4, 4)), (Downscale(1),) * 3)


def test_a_posterior_gives_its_mean_or_a_draw_with_its_deviation() -> None:
    mean, logvar = drawn(1, 2, 3, 3), torch.full((1, 2, 3, 3), 2.0)
    moments = torch.cat([mean, logvar], dim=1)
    assert torch.equal(latent_of(moments), mean)
    noise = drawn(1, 2, 3, 3) * 2
    torch.testing.assert_close(latent_of(moments, lambda shape: noise), mean + noise * np.e)
    wild = torch.cat([mean, torch.full_like(logvar, 1e6)], dim=1)
    assert bool(torch.isfinite(latent_of(wild, lambda shape: noise)).all())


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return open_checkpoint(SHAPES).build(Role.VAE).module.float()


@pytest.fixture(scope="module")
def scene_latent(trained: nn.Module) -> Tensor:
    """The latent of an image of 192x192 pixels with a shape at each crossing of tiles."""
    places = [(x, y) for x in (40, 96, 150) for y in (40, 96, 150)]
    kinds = [("red", "circle"), ("green", "square"), ("blue", "triangle")] * 3
    shapes = tuple(ShapeInScene(*kind, x, y, 22) for kind, (x, y) in zip(kinds, places, strict=True))
    pixels = torch.from_numpy(draw(Scene(shapes), 192)).permute(2, 0, 1)[None] * 2 - 1
    with torch.no_grad():
        return latent_of(encode_moments(trained, pixels))


def levels(trained: nn.Module, latent_BC: Tensor, tiling: Tiling) -> Tensor:
    """Pixels from 0 to 255, [3, H, W]."""
    with torch.no_grad():
        image_BC = tiled_decode(lambda z: decode_latent(trained, z), latent_BC, tiling, (Downscale(8),) * 2)
    return ((image_BC[0] + 1) * 127.5).clamp(0, 255)


def test_a_trained_vaes_image_by_tiles_is_the_image(trained: nn.Module, scene_latent: Tensor) -> None:
    """Norms that see one tile move colours a little; measured: 2.1 levels of 255 on average."""
    whole = levels(trained, scene_latent, Tiling(0))
    tiled = levels(trained, scene_latent, Tiling(16))
    assert float((tiled - whole).abs().mean()) < 3.0


def test_blending_leaves_no_edges(trained: nn.Module, scene_latent: Tensor) -> None:
    """Where two tiles meet the error of tiles without overlap jumps (measured: 11 levels); with overlap it does not
    (0.8; between any two rows 0.6)."""

    def jump(tiled: Tensor, rows: list[int]) -> float:
        error = tiled - whole
        return float(torch.stack([(error[:, row] - error[:, row - 1]).abs().mean() for row in rows]).mean())

    whole = levels(trained, scene_latent, Tiling(0))
    touching = jump(levels(trained, scene_latent, Tiling(12, 0)), [96])
    blended = levels(trained, scene_latent, Tiling(12, 3))
    # tiles of 10 cells: 0 to 10, 7 to 17, 14 to 24
    assert jump(blended, [56, 80, 112, 136]) < touching / 5
