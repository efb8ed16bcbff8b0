"""The encoder of images of Stable Cascade's stage C computes the formulas of EfficientNet V2, read off its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.models.components.common.efficientnet import efficientnet
from modelpool.pool.models.components.vae.build_vae import plan_vae
from modelpool.pool.models.components.vae.cascade_encoder import CascadeEncoder
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.pool.families.tiny_cascade import image_encoder

#: channels, blocks, expansion and kind of the stages of EfficientNetV2-S. Source: table 4 of the paper
PUBLISHED = [
    (24, 2, 1, True), (48, 4, 4, True), (64, 4, 4, True), (128, 6, 4, False), (160, 9, 6, False), (256, 15, 6, False),
]  # fmt: skip
#: parameters of torchvision's efficientnet_v2_s, and of its classifier of 1000 classes behind 1280 channels
WHOLE, CLASSIFIER = 21_458_488, 1280 * 1000 + 1000
#: strides of the stages, from the same table
STRIDES = {1: 1, 2: 2, 3: 2, 4: 2, 5: 1, 6: 2}


def normed(tensors: Mapping[str, Tensor], key: str, x: Tensor, epsilon: float) -> Tensor:
    mean, variance = (tensors[f"{key}.running_{name}"][:, None, None] for name in ("mean", "var"))
    x = (x - mean) / (variance + epsilon) ** 0.5
    weight = tensors.get(f"{key}.weight")
    return x if weight is None else x * weight[:, None, None] + tensors[f"{key}.bias"][:, None, None]


def layer(tensors: Mapping[str, Tensor], key: str, x: Tensor, stride: int = 1, *, is_active: bool = True) -> Tensor:
    """A convolution, depthwise if its kernels have one channel, a norm, and x * sigmoid(x)."""
    kernel = tensors[f"{key}.0.weight"]
    groups = x.shape[1] // kernel.shape[1]
    x = functional.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=groups)
    x = normed(tensors, f"{key}.1", x, 1e-3)
    return x * torch.sigmoid(x) if is_active else x


def block(tensors: Mapping[str, Tensor], key: str, x: Tensor, stride: int) -> Tensor:
    if f"{key}.2.fc1.weight" in tensors:
        made = layer(tensors, f"{key}.1", layer(tensors, f"{key}.0", x), stride)
        squeezed = made.mean((2, 3), keepdim=True)
        for name in ("fc1", "fc2"):
            squeezed = functional.conv2d(squeezed, tensors[f"{key}.2.{name}.weight"], tensors[f"{key}.2.{name}.bias"])
            squeezed = torch.sigmoid(squeezed) * (squeezed if name == "fc1" else 1)
        made = layer(tensors, f"{key}.3", made * squeezed, is_active=False)
    elif f"{key}.1.0.weight" in tensors:
        made = layer(tensors, f"{key}.1", layer(tensors, f"{key}.0", x, stride), is_active=False)
    else:
        made = layer(tensors, f"{key}.0", x, stride)
    return made + x if made.shape == x.shape else made


def encoded(tensors: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """The latents of pixels from -1 to 1."""
    mean, deviation = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    x = ((pixels + 1) / 2 - pixels.new_tensor(mean)[:, None, None]) / pixels.new_tensor(deviation)[:, None, None]
    x = layer(tensors, "backbone.0", x, 2)
    for stage, stride in STRIDES.items():
        blocks = {key.split(".")[2] for key in tensors if key.startswith(f"backbone.{stage}.")}
        for number in sorted(map(int, blocks)):
            x = block(tensors, f"backbone.{stage}.{number}.block", x, 1 if number else stride)
    x = layer(tensors, "backbone.7", x)
    return normed(tensors, "mapper.1", functional.conv2d(x, tensors["mapper.0.weight"]), 1e-5)


def test_it_computes_the_formulas_of_its_tensors() -> None:
    module = image_encoder().double()
    tensors = {key: value.double() for key, value in module.state_dict().items()}
    plan = plan_vae({key: tuple(value.shape) for key, value in tensors.items()})
    assert (plan.facts.name, plan.facts.encode_ratio, plan.facts.has_decoder) == ("cascade_c_encoder", 32, False)
    pixels = torch.rand(2, 3, 96, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected = encoded(tensors, pixels)
    assert expected.shape == (2, 16, 3, 2)
    assert expected.std() > 0.01, "weights act"
    for built in (module, plan.build(tensors)):
        torch.testing.assert_close(built.encode(pixels).latents, expected, rtol=1e-9, atol=1e-9)


def test_the_published_sizes_have_the_published_number_of_parameters_and_are_read_off_the_shapes() -> None:
    with torch.device("meta"):
        module = CascadeEncoder(3, 24, PUBLISHED, 1280, 16)
    assert sum(each.numel() for each in module.backbone.parameters()) == WHOLE - CLASSIFIER
    config = plan_vae({key: tuple(value.shape) for key, value in module.state_dict().items()}).config
    assert config == {"in_channels": 3, "first_channels": 24, "stages": PUBLISHED, "out_channels": 1280,
                      "latent_channels": 16}  # fmt: skip


def test_a_first_convolution_for_other_channels_has_no_padding() -> None:
    """As `ControlNet` of Stability-AI/StableCascade replaces it."""
    for channels, padding in ((3, 1), (1, 0), (4, 0)):
        first = efficientnet(channels, 4, [(4, 1, 1, True)] * 6, 8)[0][0]  # type: ignore[index]
        assert first.padding == (padding, padding)


def test_a_file_without_a_stage_is_refused() -> None:
    tensors = image_encoder().state_dict()
    shapes = {key: tuple(value.shape) for key, value in tensors.items() if not key.startswith("backbone.4.")}
    with pytest.raises(UnknownArchitecture, match="found blocks in stages 1, 2, 3, 5, 6; expected 1 to 6"):
        plan_vae(shapes)
