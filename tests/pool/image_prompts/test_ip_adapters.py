"""Images with IP-Adapters are those of diffusers' pipelines on the same weights and noise: every published kind, for
SD1 and SDXL, several images and adapters, blocks, and a part of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPImageProcessor

from modelpool.pool.core.errors import UnusableField
from modelpool.pool.core.stage_params import VisionEncodeParams
from modelpool.pool.specs.spec import Role
from tests.pool.families.test_controlnets import CFG, FIELDS, IMAGES, SEED, SIZE, STEPS
from tests.pool.families.tiny_model import Made, TinyModel, euler
from tests.pool.image_prompts.tiny_adapters import (
    FACE,
    SIDE,
    flat,
    ip_adapter,
    layers_for,
    vision_encoder,
    write_encoder,
)
from tests.pool.loading import layouts

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TOLERANCE = 1e-5


class Adapted:
    """A tiny model with IP-Adapters for it, and their vision encoder, in its folder."""

    def __init__(self, folder: Path, layout: Any, kinds: tuple[str, ...]) -> None:
        self.tiny = TinyModel(folder, layout)
        self.encoder = vision_encoder()
        write_encoder(folder / "clip_vision" / "image_encoder", self.encoder)
        (folder / "ipadapter").mkdir()
        layers = layers_for(self.tiny.module(Role.DIFFUSION_MODEL))
        self.tables = {kind: ip_adapter(kind, layers, seed) for seed, kind in enumerate(kinds)}
        for kind, tables in self.tables.items():
            save_file(flat(tables), folder / "ipadapter" / f"{kind}.safetensors")

    def latent(self, made: Made, names: tuple[str, ...], scales: list[Any], **more: Any) -> Tensor:
        """What diffusers comes to with these adapters."""
        tiny = self.tiny
        size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        parts: dict[str, Any] = {"vae": tiny.module(Role.VAE), "unet": tiny.module(Role.DIFFUSION_MODEL)}
        parts |= {"scheduler": euler(), "text_encoder": None, "tokenizer": None, "image_encoder": self.encoder}
        parts["feature_extractor"] = CLIPImageProcessor(**size)
        if tiny.family.name == "sdxl":
            pipeline: Any = StableDiffusionXLPipeline(
                **parts, text_encoder_2=None, tokenizer_2=None, add_watermarker=False
            )
        else:
            pipeline = StableDiffusionPipeline(**parts, safety_checker=None, requires_safety_checker=False)
        pipeline.set_progress_bar_config(disable=True)
        processors = dict(pipeline.unet.attn_processors)
        tables = [self.tables[name] for name in names]
        try:
            pipeline.load_ip_adapter(
                tables if len(tables) > 1 else tables[0], subfolder="", weight_name=[""] * len(names),
                image_encoder_folder=None, low_cpu_mem_usage=False,
            )  # fmt: skip
            pipeline.set_ip_adapter_scale(scales if len(scales) > 1 else scales[0])
            found: Tensor = pipeline(
                **made.texts, **SIZE, **more, num_inference_steps=STEPS, guidance_scale=CFG, output_type="latent",
                generator=torch.Generator().manual_seed(SEED),
            ).images  # fmt: skip
        finally:
            pipeline.unet.encoder_hid_proj = None
            pipeline.unet.config.encoder_hid_dim_type = None
            pipeline.unet.set_attn_processor(processors)
        return found


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    kinds = ("base", "full", "plus", "faceid", "faceid_plus")
    found = Adapted(tmp_path_factory.mktemp("sd1"), layouts.tiny_sd1(), kinds)
    yield found
    found.tiny.close()


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    found = Adapted(tmp_path_factory.mktemp("sdxl"), layouts.tiny_sdxl(), ("base", "plus"))
    yield found
    found.tiny.close()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def used(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "image": IMAGES["canny"], **more}


@pytest.mark.parametrize("kind", ["base", "full", "plus"])
def test_each_kind_is_that_of_diffusers(sd1: Adapted, kind: str) -> None:
    made = sd1.tiny.made(image_prompts=[used(kind, strength=0.7)], **SIZE, **FIELDS)
    expected = sd1.latent(made, (kind,), [0.7], ip_adapter_image=IMAGES["canny"])
    assert_close(made.latents[0], expected)
    assert not torch.allclose(made.latents[0], sd1.tiny.made(**SIZE, **FIELDS).latents[0], atol=1e-2)
