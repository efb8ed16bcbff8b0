"""What else acts in a run acts in one that real processes share: the latents are those of one worker, byte for byte
where members divide the texts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from safetensors.torch import save_file

from modelpool.pool.values.specs.spec import Role
from tests.each_case import each_case
from tests.pool.engine.gang.asked_members import AskedMembers, Sampled
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.test_controlnets import IMAGES, controlled
from tests.pool.families.test_from_images import filling, image, mask
from tests.pool.families.test_transformer_controlnets import CONTROLS
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_qwen_edit import SEEING
from tests.pool.families.tiny_relatives import ALL_FAMILIES
from tests.pool.families.tiny_shown import SHOWN_FAMILIES, TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.inference.image_prompts.test_flux_ip_adapters import as_xlabs, instantx, xlabs
from tests.pool.inference.image_prompts.test_flux_ip_adapters import flat as flat_flux
from tests.pool.inference.image_prompts.test_ip_adapters import Adapted
from tests.pool.inference.image_prompts.tiny_adapters import siglip, vision_encoder, write_encoder
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
#: of the largest value: tokens are summed in another order
TOLERANCE = 1e-5
GUIDED: dict[str, Any] = {"steps": 3, "cfg": 3.0, "negative": "blurry", "width": 64, "height": 48}
UNET: dict[str, Any] = {**GUIDED, "sampler": "euler", "schedule": "normal"}
VIDEO: dict[str, Any] = {**GUIDED, "frames": 5}


@dataclass(frozen=True)
class Case:
    """A model in a folder, and what is asked of it.

    alone   differs from `fields` in this, and so do the latents
    exact   members divide texts alone
    """

    make: Callable[[Path], None]
    fields: Mapping[str, Any]
    plain: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True


def unet(folder: Path, layout: Callable[[], Any] = layouts.tiny_sd1) -> None:
    TinyModel(folder, layout()).close()


def family(folder: Path, tiny: TinyFamily) -> None:
    TinyFamilyModel(folder, tiny).close()


def named(name: str) -> Callable[[Path], None]:
    return partial(family, tiny=ALL_FAMILIES[name])


def unet_control(folder: Path) -> None:
    controlled(folder, "sd1").close()


def unet_prompts(folder: Path) -> None:
    Adapted(folder, layouts.tiny_sd1(), ("plus",)).tiny.close()


def loras(folder: Path) -> None:
    unet(folder)
    (folder / "loras").mkdir()
    for seed, name in enumerate(("twist", "turn")):
        write_tiny_lora(folder / "loras" / f"{name}.safetensors", seed)


def with_control(folder: Path, case: str) -> None:
    name, make, publish = CONTROLS[case]
    tiny_controls.write(folder / "controlnet" / "canny.safetensors", make, 5, publish)
    named(name)(folder)


def flux_prompts(folder: Path) -> None:
    encoder = siglip()
    write_encoder(folder / "clip_vision" / "clip", vision_encoder())
    write_encoder(folder / "clip_vision" / "siglip", encoder)
    (folder / "style_models").mkdir()
    redux = seeded(lambda: ReduxImageEncoder(encoder.config.hidden_size, WIDTH), 8)
    save_file(redux.state_dict(), folder / "style_models" / "flux1-redux-dev.safetensors")
    (folder / "ipadapter").mkdir()
    save_file(as_xlabs(xlabs(1)), folder / "ipadapter" / "one.safetensors")
    save_file(flat_flux(instantx(3)), folder / "ipadapter" / "instant.safetensors")
    named("flux_dev")(folder)


def control(**more: Any) -> dict[str, Any]:
    return {"controls": [{"model": "canny", "image": image(), "strength": 0.7, **more}]}


def prompted(*names: str, **more: Any) -> dict[str, Any]:
    return {"image_prompts": [{"model": name, "image": image(), **more} for name in names]}


def options(**on: Any) -> dict[str, Any]:
    return {"options": on}


BY_TEXTS: dict[str, Case] = {
    "sd1 ControlNet": Case(unet_control, UNET | {"controls": [{"model": "canny", "image": IMAGES["canny"]}]}, {"controls": []}),
    "sd3 ControlNet": Case(partial(with_control, case="sd3"), GUIDED | control(), {"controls": []}),
    "qwen_image ControlNet": Case(partial(with_control, case="qwen_image"), GUIDED | control(), {"controls": []}),
    "sd1 image prompt": Case(unet_prompts, UNET | prompted("plus"), {"image_prompts": []}),
    "sd1 inpainting": Case(partial(unet, layout=lambda: filling("sd1")), UNET | {"image": image(), "mask": mask()}),
    "sd1 regions": Case(unet, UNET | {"regions": ["0,0,32,48=a", "32,0,32,48=b"]}, {"regions": []}),
    "sd1 LoRA of a text": Case(loras, UNET | {"loras": ["twist:1:only=negative", "turn:0.2@0,0.8@0.5"]}, {"loras": []}),
    "qwen edit": Case(partial(family, tiny=SEEING), GUIDED | {"reference": image(32, 96)}),
    **{
        f"sd1 {next(iter(on))}": Case(unet, UNET | options(**on), {"options": {}})
        for on in (
            {"pag": 3}, {"freeu": True}, {"deepcache": 2}, {"hypertile": 32}, {"tiled": {"tile": 64, "overlap": 16}},
            {"attention_scale.image": "MID*0.5"}, {"rescale_cfg": 0.7},
        )
    },
    **{
        f"wan {next(iter(on))}": Case(named("wan_t2v"), VIDEO | options(**on), {"options": {}})
        for on in ({"slg": {"layers": [0], "start": 0.0, "end": 1.0}}, {"fbcache": 5.0}, {"cfg_zero": 1}, {"rope": {"scale_x": 0.5}})
    },
}  # fmt: skip


def assert_shared(alone: Sampled, shared: list[Sampled], exact: bool) -> None:
    """All members have the latents of one worker."""
    assert not any(each.error for each in (alone, *shared)), [each.error for each in (alone, *shared)]
    assert alone.latents is not None
    for each in shared:
        np.testing.assert_array_equal(each.latents, shared[0].latents)
    assert shared[0].latents is not None
    most = 0.0 if exact else TOLERANCE * float(np.abs(alone.latents).max())
    np.testing.assert_allclose(shared[0].latents, alone.latents, atol=most, rtol=0)


@pytest.fixture(scope="module")
def pool() -> Iterator[AskedMembers]:
    found = AskedMembers(4)
    yield found
    found.close()


@each_case("name", BY_TEXTS)
def test_members_that_divide_texts_make_the_same_bytes(name: str, pool: AskedMembers, tmp_path: Path) -> None:
    case = BY_TEXTS[name]
    case.make(tmp_path)
    fields = {**case.fields, "gpus": 2}
    alone = pool.alone(tmp_path, fields)
    assert_shared(alone, pool.shared(tmp_path, fields), exact=True)
    if case.plain:
        plain = pool.alone(tmp_path, {**fields, **case.plain})
        assert plain.latents is not None, plain.error
        assert not np.array_equal(plain.latents, alone.latents), "it acts"
