"""Tensors that no module has: training tools leave them in files of every family. They are named and change nothing; a
tensor that is missing is an error all the same. VAEs have this test in tests/pool/models/components/vae; LoRAs name
what they do not use (tests/pool/weights/patches/test_lora_file.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet, plan_controlnet
from modelpool.pool.inference.image_prompts.open_adapter import OpenImagePrompt
from modelpool.pool.inference.upscalers.open_upscaler import OpenUpscaler
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.components.text.build_text_encoder import facts_named, plan_text_encoder
from modelpool.pool.models.components.vision.build_vision_encoder import plan_vision
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import ControlRef, ImagePromptRef, UpscalerRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import KeyMap
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.inference.controlnets.test_transformer_build import CASES as CONTROLNETS
from tests.pool.inference.image_prompts.tiny_adapters import flat, ip_adapter
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state
from tests.pool.models.components.diffusion.image_cases import CASES as IMAGES
from tests.pool.models.components.diffusion.video_cases import CASES as VIDEOS
from tests.pool.models.components.text.cases import CASES as TEXTS
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

Shapes = Mapping[str, tuple[int, ...]]
#: in a block, as a trainer that replaces modules leaves it, and beside the blocks
EXTRA = ("blocks.0.attn.surplus.weight", "surplus.weight")


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in tensors.items()}


def assert_ignored(
    shapes: Shapes, fitting: Callable[[Shapes], tuple[nn.Module, KeyMap]], extra: str, unused: tuple[str, ...] = ()
) -> None:
    """The module has the parameters of the file without the tensor, and the tensor is named."""
    module, key_map = fitting({**shapes, extra: (1,)})
    assert not any("surplus" in key for key in module.state_dict())
    assert set(key_map.unused) == {*unused, extra}


def test_diffusion_models_of_every_family_ignore_them() -> None:
    for number, case in enumerate((*IMAGES.values(), *VIDEOS.values())):
        with torch.device("meta"):
            shapes = shapes_of(case.file(case.empty()))
        assert_ignored(shapes, lambda shapes: plan_diffusion_model(shapes).fitting(), EXTRA[number % 2], case.unused)


def test_text_encoders_of_every_kind_ignore_them() -> None:
    seen = set()
    for name, case in TEXTS.items():
        kind = (case.layout, name.split("_")[0])
        if kind in seen or name.startswith(("clip_g", "clip_h")):  # 24 and 32 layers of what CLIP L has
            continue
        seen.add(kind)
        file = shapes_of(case.file(case.module()))
        level = next(key for key in file if ".0." in key).split("0.")[0]
        facts = facts_named(case.name, case.layout)

        def fitting(shapes: Shapes, facts: Any = facts) -> tuple[nn.Module, KeyMap]:
            return plan_text_encoder(shapes, facts=facts).fitting()

        assert_ignored(file, fitting, f"{level}0.surplus.weight", case.unused)


def test_controlnets_of_every_kind_ignore_them() -> None:
    for _, make, publish in CONTROLNETS.values():
        with torch.device("meta"):
            shapes = shapes_of(publish(make().state_dict()))
        unused = tuple(plan_controlnet(shapes).key_map.unused)  # the marker of a union
        assert_ignored(shapes, lambda shapes: plan_controlnet(shapes).fitting(), "surplus.weight", unused)
    unet = ldm_controlnet(layouts.TINY_UNET)
    for extra in ("control_model.surplus.weight", "control_model.input_blocks.1.1.surplus.weight"):
        assert_ignored(unet, lambda shapes: plan_controlnet(shapes).fitting(), extra)


def test_a_layer_too_many_or_a_tensor_missing_is_still_an_error() -> None:
    with torch.device("meta"):
        flux = shapes_of(IMAGES["flux_dev"].file(IMAGES["flux_dev"].empty()))
    clip = shapes_of(TEXTS["clip_l bare"].file(TEXTS["clip_l bare"].module()))
    short = {key: shape for key, shape in flux.items() if key != "double_blocks.0.img_mlp.2.bias"}
    with pytest.raises(UnknownArchitecture, match=r"1 parameter has no source"):
        plan_diffusion_model({**short, "surplus.weight": (1,)}).empty()
    vision = {"vision_model.surplus": (1,), **clip}
    with pytest.raises(UnknownArchitecture):
        plan_vision(vision).empty()
    with torch.device("meta"):
        sd3 = shapes_of(IMAGES["sd3"].empty().state_dict())
    with pytest.raises(UnknownArchitecture, match=r"such layers|found \d+ layers|no source"):
        plan_diffusion_model({**sd3, "transformer_blocks.7.surplus.weight": (1,)}).empty()


def test_a_unet_and_its_text_encoder_name_them_and_load_their_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        "model.diffusion_model.input_blocks.1.1.surplus.weight": (2,),
        "model.diffusion_model.odd": (1,),
        "cond_stage_model.transformer.text_model.encoder.layers.0.surplus.weight": (3,),
    }
    whole = layouts.tiny_sd1()
    plain = open_checkpoint(write_tiny_checkpoint(tmp_path / "plain.safetensors", layout=whole))
    odd = open_checkpoint(write_tiny_checkpoint(tmp_path / "odd.safetensors", layout={**whole, **extra}))
    for role in (Role.DIFFUSION_MODEL, Role.TEXT_ENCODER):
        assert odd.build(role).module.state_dict().keys() == plain.build(role).module.state_dict().keys()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].endswith(
        "its diffusion_model has no parameter for 2 tensors, which are not used: "
        "model.diffusion_model.input_blocks.1.1.surplus.weight, model.diffusion_model.odd"
    )
    assert "its text_encoder has no parameter for 1 tensors" in messages[1]
    short = {key: shape for key, shape in whole.items() if key != "model.diffusion_model.out.2.bias"}
    lacking = open_checkpoint(write_tiny_checkpoint(tmp_path / "short.safetensors", layout={**short, **extra}))
    with pytest.raises(UnknownArchitecture, match="1 parameter has no source"):
        lacking.build(Role.DIFFUSION_MODEL)


def test_a_controlnet_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = {**ldm_controlnet(layouts.TINY_UNET), "control_model.surplus.weight": (2,)}
    path = write_tiny_checkpoint(tmp_path / "control.safetensors", layout=layout)
    with caplog.at_level(logging.WARNING):
        OpenControlNet(ControlRef("control", str(path), "00", 1.0, 0.0, 1.0), "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: its ControlNet has no parameter for 1 tensors, which are not used: control_model.surplus.weight"
    ]


def test_an_upscaler_and_an_image_prompt_adapter_name_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But not the LoRA that files of FaceID include, which is published as a file of its own, too."""
    upscaler, adapter = tmp_path / "4x.safetensors", tmp_path / "plus.safetensors"
    save_file({**tiny_state("compact_2x"), "odd": torch.zeros(1)}, upscaler)
    lora = {"ip_adapter.1.to_q_lora.down.weight": torch.zeros(4, 8)}
    save_file({**flat(ip_adapter("plus", [(8, 16)])), **lora, "ip_adapter.1.surplus": torch.zeros(1)}, adapter)
    with caplog.at_level(logging.WARNING):
        OpenUpscaler(UpscalerRef("4x", str(upscaler), "00", 2), "cpu")
        OpenImagePrompt(ImagePromptRef("plus", str(adapter), "00", 1.0), "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        f"{upscaler}: its upscaler has no parameter for 1 tensors, which are not used: odd",
        f"{adapter}: its image prompt adapter has no parameter for 1 tensors, which are not used: ip_adapter.1.surplus",
    ]
