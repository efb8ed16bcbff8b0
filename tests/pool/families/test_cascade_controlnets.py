"""ControlNets of Stable Cascade add projections of an image before residual blocks of stage C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_stable_cascade import SDCascadeResBlock
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.inference.controlnets.open_controlnet import plan_controlnet
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_cascade import (
    STAGE_B,
    STAGE_C,
    Pair,
    control,
    controlled_stage_c_file,
    stage_c_file,
    write_files,
)

REQUEST: dict[str, Any] = {
    "model": STAGE_C, "prompt": "a red circle", "width": 256, "height": 128, "steps": 2, "cfg": 3.0, "seed": 4,
    "decoder": {"steps": 1},
}  # fmt: skip
#: blocks of stage C before which a ControlNet adds. Source: configs/inference/controlnet_c_3b_*.yaml of
#: Stability-AI/StableCascade
PLACES = [0, 4, 8, 12, 51, 55, 59, 63]
CELLS = (3, 6)


def write(folder: Path, stage_c: Callable[[], Any] = controlled_stage_c_file) -> None:
    write_files(folder, stage_c())
    for name, channels in (("canny", 1), ("colours", 3), ("inpainting", 4)):
        tensors = {key: value.contiguous() for key, value in control(channels).state_dict().items()}
        save_file(tensors, folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("cascade")
    write(folder)
    pair = Pair(folder)
    yield pair
    pair.engine.close()


def photo(width: int = 256, height: int = 128) -> Image.Image:
    levels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def latent(pair: Pair, **fields: Any) -> Any:
    return pair.run(**{**REQUEST, **fields}).sampled()[0][1].samples_CHW


def nearest(image: Image.Image) -> Tensor:
    """An image from 0 to 1 at 32 pixels a cell, as `nearest-exact` of PyTorch scales it."""
    pixels = torch.from_numpy(np.array(image)).float().reshape(image.height, image.width, -1) / 255
    size = tuple(32 * side for side in CELLS)
    return functional.interpolate(pixels.permute(2, 0, 1)[None], size=size, mode="nearest-exact")


@contextmanager
def delivered(model: Any, projections: list[Tensor], is_active: Callable[[int], bool]) -> Iterator[None]:
    """As `ControlNetDeliverer` of the published code: each residual block that runs takes the next projection."""
    turn, calls = [0], [-1]
    by_place = dict(zip(PLACES, projections, strict=True))

    def begin(module: Any, args: Any, kwargs: Any) -> None:
        turn[0] = 0
        calls[0] += 1

    def take(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found, turn[0] = by_place.get(turn[0]), turn[0] + 1
        if found is None or not is_active(calls[0]):
            return args
        x, *rest = args
        return (x + functional.interpolate(found, size=x.shape[-2:], mode="bilinear", align_corners=True), *rest)

    blocks = [block for block in model.modules() if isinstance(block, SDCascadeResBlock)]
    handles = [block.register_forward_pre_hook(take) for block in blocks]
    handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
    try:
        yield
        assert turn[0] == 64
    finally:
        for handle in handles:
            handle.remove()


CASES: dict[str, Callable[[Tensor], Tensor]] = {"canny": lambda x: x.mean(1, keepdim=True), "colours": lambda x: x}


@pytest.mark.parametrize("name", CASES)
def test_projections_are_added_as_the_published_code_adds_them(name: str, pair: Pair) -> None:
    image = photo(300, 200)
    cut = image.crop((0, 25, 300, 175))  # as wide as the output
    with torch.no_grad():
        projections = [0.7 * each for each in control(1 if name == "canny" else 3)(CASES[name](nearest(cut)))]
    use = {"model": name, "image": image, "strength": 0.7}
    plain, found, half = latent(pair), latent(pair, controls=[use]), latent(pair, controls=[{**use, "end": 0.5}])
    model = pair.module(STAGE_C, Role.DIFFUSION_MODEL)
    for ours, is_active in ((found, lambda call: True), (half, lambda call: call == 0)):
        with delivered(model, projections, is_active):  # both texts of a step are one call
            expected = latent(pair)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        assert np.abs(ours - plain).max() > 1e-2 * np.abs(plain).max(), "it acts"
    both = latent(pair, controls=[use, {**use, "strength": 0.3}])
    whole = latent(pair, controls=[{**use, "strength": 1.0}])
    np.testing.assert_allclose(both, whole, rtol=1e-4, atol=1e-4 * np.abs(whole).max(), err_msg="strengths add up")


def masked() -> Image.Image:
    mask = Image.new("L", (256, 128), 0)
    mask.paste(255, (96, 32, 192, 96))
    return mask


def with_alpha(image: Image.Image, mask: Image.Image) -> dict[str, Any]:
    """The workflow of an image with a mask as its alpha channel: white where the mask is."""
    nodes = {
        "image": {"kind": "image", "image": Image.composite(Image.new("RGB", image.size, "white"), image, mask)},
        "mask": {"kind": "mask", "mask": mask},
        "inverted": {"kind": "operation", "name": "mask_invert", "inputs": {"mask": "mask"}},
        "joined": {"kind": "operation", "name": "image_with_alpha", "inputs": {"image": "image", "mask": "inverted"}},
        "first": {
            "kind": "sample", "inputs": {"controls.0": "joined"},
            "request": {
                **{name: value for name, value in REQUEST.items() if name != "decoder"},
                "controls": [{"model": "inpainting"}],
            },
        },
        "text": {"kind": "text", "model": STAGE_C, "prompt": "a red circle"},
        "second": {
            "kind": "sample", "inputs": {"prior": "first", "positive": "text"},
            "request": {"model": STAGE_B, "prompt": "", "width": 256, "height": 128, "steps": 1, "seed": 5},
        },
        "decoded": {"kind": "decode", "model": STAGE_B, "inputs": {"latent": "second"}},
    }  # fmt: skip
    return {"nodes": nodes, "output": "decoded"}


def test_a_mask_is_the_fourth_channel_given_apart_or_as_alpha_channel(pair: Pair) -> None:
    image, mask = photo(), masked()
    with torch.no_grad():
        white = nearest(Image.composite(Image.new("RGB", image.size, "white"), image, mask))
        projections = list(control(4)(torch.cat((white, nearest(mask)), dim=1)))
    apart = latent(pair, controls=[{"model": "inpainting", "image": image, "mask": mask}])
    with delivered(pair.module(STAGE_C, Role.DIFFUSION_MODEL), projections, lambda call: True):
        expected = latent(pair)
    np.testing.assert_allclose(apart, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    joined = pair.run(workflow=with_alpha(image, mask)).sampled()[0][1].samples_CHW
    np.testing.assert_allclose(joined, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_images_with_other_channels_are_refused(pair: Pair) -> None:
    with pytest.raises(UnusableField, match=r"found no alpha channel; ControlNet 'inpainting' reads a mask in"):
        pair.run(**REQUEST, controls=[{"model": "inpainting", "image": photo()}])
    workflow = with_alpha(photo(), masked())
    workflow["nodes"]["first"]["request"]["controls"] = [{"model": "colours"}]
    with pytest.raises(UnusableField, match=r"found an alpha channel; ControlNet 'colours' reads colours alone"):
        pair.run(workflow=workflow)


def test_a_stage_c_of_other_sizes_is_refused(tmp_path: Path) -> None:
    write(tmp_path, stage_c_file)
    pair = Pair(tmp_path)
    expected = r"ControlNet 'canny' \(blocks 64, width 64\)\", expected .* \(blocks 6, width 64 and 128\)"
    with pytest.raises(UnusableField, match=expected):
        pair.run(**REQUEST, controls=[{"model": "canny", "image": photo()}])
    pair.engine.close()


def test_streamed_weights_on_the_simulated_device_make_what_resident_ones_make(pair: Pair, tmp_path: Path) -> None:
    write(tmp_path)
    streamed = Pair(tmp_path, EngineSettings("sim", budget_bytes=512 << 20, vram_policy=VramPolicy.NONE))
    fields: dict[str, Any] = {"controls": [{"model": "colours", "image": photo()}], "steps": 1, "cfg": 1.0}
    expected, found = latent(pair, **fields), latent(streamed, **fields)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    streamed.engine.close()


def test_a_file_with_other_projections_is_refused() -> None:
    """Such as the published one for faces, with 64."""
    shapes = {key: tuple(value.shape) for key, value in control(3).state_dict().items()}
    kept = {key: shape for key, shape in shapes.items() if not key.startswith("projections.7.")}
    with pytest.raises(UnknownArchitecture, match="found 7 projections, expected 8, for the blocks 0, 4, 8, 12, 51"):
        plan_controlnet(kept)
