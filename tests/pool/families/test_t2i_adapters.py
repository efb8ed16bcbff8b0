"""T2I-Adapters: every published key layout is recognised, and images with them are those of diffusers' pipelines on the
same weights and noise: for SD1 and SDXL, full and light, two at once, in a part of the steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    MultiAdapter,
    StableDiffusionAdapterPipeline,
    StableDiffusionXLAdapterPipeline,
    T2IAdapter,
)
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_keys
from modelpool.pool.inference.controlnets.open_controlnet import plan_controlnet
from modelpool.pool.inference.controlnets.t2i_adapters import t2i_adapter_config
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_controlnets import CFG, FIELDS, IMAGES, SEED, SIZE, STEPS
from tests.pool.families.tiny_model import Made, TinyModel, euler
from tests.pool.families.tiny_transformers import seeded
from tests.pool.models.loading import layouts

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TOLERANCE = 1e-5


def adapter(channels: list[int], kind: str, colors: int = 3, blocks: int = 2) -> Any:
    return T2IAdapter(colors, channels, blocks, 16 if kind == "full_adapter_xl" else 8, kind)


def original_names(state: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """As TencentARC publishes them."""
    found = {}
    for name, tensor in state.items():
        key = name.removeprefix("adapter.")
        if any(".out_conv." in each for each in state):
            key = key.replace(".resnets.", ".body.")
        elif match := re.match(r"body\.(\d+)\.resnets\.(\d+)\.(.*)", key):
            key = f"body.{int(match[1]) * blocks + int(match[2])}.{match[3]}"
        elif match := re.match(r"body\.(\d+)\.in_conv\.(.*)", key):
            key = f"body.{int(match[1]) * blocks}.in_conv.{match[2]}"
        found[key] = tensor.contiguous()
    return found


def channels_of(tiny: TinyModel) -> list[int]:
    return list(tiny.module(Role.DIFFUSION_MODEL).config.block_out_channels)


class Adapted:
    """A tiny model with adapters for it in its folder."""

    def __init__(self, folder: Path, layout: Any) -> None:
        self.tiny = TinyModel(folder, layout)
        self.folder = folder / "t2i_adapter"
        self.folder.mkdir()
        self.modules: dict[str, Any] = {}

    def add(self, name: str, channels: list[int], kind: str, colors: int = 3, original: bool = False) -> None:
        module = seeded(lambda: adapter(channels, kind, colors), len(self.modules))
        state = module.state_dict()
        save_file(original_names(state, 2) if original else state, self.folder / f"{name}.safetensors")
        self.modules[name] = module

    def latent(self, made: Made, names: tuple[str, ...], strengths: tuple[float, ...], factor: float = 1.0) -> Tensor:
        """What diffusers comes to."""
        tiny = self.tiny
        vae, unet = tiny.module(Role.VAE), tiny.module(Role.DIFFUSION_MODEL)
        modules = [self.modules[name] for name in names]
        images = [IMAGES["canny"] if m.config.in_channels == 3 else IMAGES["canny"].convert("L") for m in modules]
        parts: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": euler(), "text_encoder": None}
        parts |= {"tokenizer": None, "adapter": modules[0] if len(modules) == 1 else MultiAdapter(modules)}
        if tiny.family.name == "sdxl":
            kind: Any = StableDiffusionXLAdapterPipeline
            parts |= {"text_encoder_2": None, "tokenizer_2": None}
        else:
            kind = StableDiffusionAdapterPipeline
            parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = kind(**parts)
        pipeline.set_progress_bar_config(disable=True)
        alone = len(names) == 1
        found: Tensor = pipeline(
            **made.texts, **SIZE, image=images[0] if alone else images, num_inference_steps=STEPS, guidance_scale=CFG,
            adapter_conditioning_scale=strengths[0] if alone else list(strengths), output_type="latent",
            generator=torch.Generator().manual_seed(SEED),
            **({"adapter_conditioning_factor": factor} if kind is StableDiffusionXLAdapterPipeline else {}),
        ).images  # fmt: skip
        return found


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    found = Adapted(tmp_path_factory.mktemp("sd1"), layouts.tiny_sd1())
    channels = channels_of(found.tiny)
    found.add("full", channels, "full_adapter")
    found.add("original", channels, "full_adapter", colors=1, original=True)
    found.add("other", channels, "full_adapter", original=True)
    yield found
    found.tiny.close()


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    found = Adapted(tmp_path_factory.mktemp("sdxl"), layouts.tiny_sdxl())
    channels = channels_of(found.tiny)
    found.add("xl", channels, "full_adapter_xl", original=True)
    yield found
    found.tiny.close()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def used(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "image": IMAGES["canny"], **more}


def test_each_is_that_of_diffusers(sd1: Adapted) -> None:
    plain = sd1.tiny.made(**SIZE, **FIELDS).latents[0]
    for names in (("full",), ("original",), ("full", "other")):
        strengths = (0.8, 0.5)[: len(names)]
        controls = [used(name, strength=each) for name, each in zip(names, strengths, strict=True)]
        made = sd1.tiny.made(controls=controls, **SIZE, **FIELDS)
        assert_close(made.latents[0], sd1.latent(made, names, strengths))
        assert not torch.allclose(made.latents[0], plain, atol=1e-3)


def test_one_for_sdxl_in_a_part_of_the_steps_is_that_of_diffusers(sdxl: Adapted) -> None:
    for factor in (1.0, 0.5):
        made = sdxl.tiny.made(controls=[used("xl", strength=0.7, end=factor)], **SIZE, **FIELDS)
        assert_close(made.latents[0], sdxl.latent(made, ("xl",), (0.7,), factor))


def test_one_for_other_models_is_refused_by_name(sd1: Adapted, sdxl: Adapted) -> None:
    source = sdxl.folder / "xl.safetensors"
    expected = r"T2I-Adapter 'xl' for Stable Diffusion XL .*expected a T2I-Adapter for models like 'tiny'"
    with pytest.raises(UnusableField, match=expected):
        sd1.tiny.made(controls=[used(str(source))], **SIZE, **FIELDS)


def test_it_is_called_once_in_a_run_of_several_steps(sd1: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    sd1.tiny.made(controls=[used("full")], **SIZE, **FIELDS)  # the first run of a size is counted on the meta device
    calls = []
    forward = T2IAdapter.forward
    monkeypatch.setattr(T2IAdapter, "forward", lambda self, x: calls.append(len(x)) or forward(self, x))
    made = sd1.tiny.made(controls=[used("full")], **SIZE, **FIELDS)
    assert calls == [1]
    (sample,) = [task for task in made.tasks if len(task.uses) == 2]
    assert [use.passes for use in sample.uses] == [STEPS, 1]


#: (kind, image channels, first keys): TencentARC's t2iadapter_*_sd14v1.pth, t2iadapter_*_sd15v2, the XL ones, the
#: light ones, and all of diffusers' T2IAdapter
FULL_SIZE = [
    ("full_adapter", 3, [320, 640, 1280, 1280]),
    ("full_adapter", 1, [320, 640, 1280, 1280]),
    ("full_adapter_xl", 3, [320, 640, 1280, 1280]),
    ("light_adapter", 3, [320, 640, 1280]),
]


@pytest.mark.parametrize("original", [True, False])
def test_published_layouts_are_recognised(original: bool) -> None:
    for kind, colors, channels in FULL_SIZE:
        blocks = 4 if kind == "light_adapter" else 2
        with torch.device("meta"):
            state = adapter(channels, kind, colors, blocks).state_dict()
        named = original_names(state, blocks) if original else state
        assert kind_of_keys(named, is_diffusion_model=False) is FileKind.CONTROLNET
        plan = plan_controlnet({key: tuple(value.shape) for key, value in named.items()})
        expected = {"in_channels": colors, "channels": channels, "num_res_blocks": blocks, "adapter_type": kind}
        assert plan.config == {**expected, "downscale_factor": 16 if kind == "full_adapter_xl" else 8}
        plan.empty()


@pytest.mark.parametrize("kind", ["full_adapter", "full_adapter_xl", "light_adapter"])
def test_an_original_is_the_module_of_diffusers(kind: str) -> None:
    module = seeded(lambda: adapter([8, 16, 16], kind), 1)
    named = original_names(module.state_dict(), 2)
    built = plan_controlnet({key: tuple(value.shape) for key, value in named.items()}).build(named)
    image = torch.rand((1, 3, 64, 64), generator=torch.Generator().manual_seed(2))
    for found, expected in zip(built(image), module(image), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_size_that_no_adapter_has_is_named() -> None:
    with pytest.raises(UnknownArchitecture, match="found 5 input channels"):
        t2i_adapter_config({"adapter.conv_in.weight": (4, 5, 3, 3), "adapter.body.0.resnets.0.block1.weight": (4,) * 4})


def test_a_size_that_is_no_multiple_of_its_cells_works(sdxl: Adapted) -> None:
    made = sdxl.tiny.made(controls=[used("xl")], **{**FIELDS, "width": 56, "height": 40})
    assert torch.isfinite(made.latents[0]).all()
