"""What else acts in a run acts in one that real processes share: the latents are the latents of one worker, byte for
byte where members divide the texts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from safetensors.torch import save_file

from modelpool.pool.families.option_support import supported_options
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.sampling_facts import VideoFacts
from tests.each_case import each_case
from tests.pool.engine.gang.asked_members import AskedMembers, Sampled
from tests.pool.engine.gang.members import write_lora
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
#: no negative prompt
ONE: dict[str, Any] = {"cfg": 1.0, "negative": ""}
UNET: dict[str, Any] = {**GUIDED, "sampler": "euler", "schedule": "normal"}
VIDEO: dict[str, Any] = {**GUIDED, "height": 64, "frames": 9}


@dataclass(frozen=True)
class Case:
    """A model in a folder, and requests to it.

    plain   other fields, with which the latents differ
    """

    make: Callable[[Path], None]
    fields: Mapping[str, Any]
    plain: Mapping[str, Any] = field(default_factory=dict)


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


def flux_lora(folder: Path) -> None:
    tiny = TinyFamilyModel(folder, ALL_FAMILIES["flux_dev"])
    write_lora(tiny, folder / "loras")
    tiny.close()


#: with as many blocks as the model for which coefficients of TeaCache were published
DEEP = replace(
    ALL_FAMILIES["flux_dev"],
    model=lambda: diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=19, num_single_layers=38, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 14, 14), guidance_embeds=True,
    ),
)  # fmt: skip


def control(**more: Any) -> dict[str, Any]:
    return {"controls": [{"model": "canny", "image": image(), "strength": 0.7, **more}]}


def prompted(*names: str, **more: Any) -> dict[str, Any]:
    return {"image_prompts": [{"model": name, "image": image(), **more} for name in names]}


def options(**on: Any) -> dict[str, Any]:
    return {"options": on}


SKIPPED: dict[str, Any] = {"slg": {"layers": [0], "start": 0.0, "end": 1.0}}
BY_TEXTS: dict[str, Case] = {
    "sd1 ControlNet": Case(unet_control, UNET | control(image=IMAGES["canny"]), {"controls": []}),
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
        for on in (SKIPPED, {"fbcache": 5.0}, {"cfg_zero": 1}, {"rope": {"scale_x": 0.5}})
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


def assert_made_alike(case: Case, pool: AskedMembers, folder: Path, exact: bool) -> None:
    """What acts in a run makes the same of it in a gang, and something else than without."""
    case.make(folder)
    fields = {"gpus": 2, **case.fields}
    alone = pool.alone(folder, fields)
    assert_shared(alone, pool.shared(folder, fields), exact)
    if case.plain:
        plain = pool.alone(folder, {**fields, **case.plain})
        assert plain.latents is not None, plain.error
        assert not np.array_equal(plain.latents, alone.latents), "it acts"


FLUX: dict[str, Any] = {"steps": 3, "cfg": 3.0, "width": 64, "height": 48}
BY_TOKENS: dict[str, Case] = {
    **{
        f"{case} ControlNet": Case(partial(with_control, case=case), fields | control(), {"controls": []})
        for case, fields in {
            "flux": FLUX,
            "flux, many blocks": FLUX,
            "flux of xlabs": FLUX,
            "qwen_image": GUIDED | ONE,
            "z_image": FLUX,
            "z_image 2.1": FLUX,
            "sd3": GUIDED | ONE,
            "sd35_large": GUIDED | ONE,
            "hunyuan_dit": GUIDED | ONE,
        }.items()
    },
    "flux Redux": Case(flux_prompts, FLUX | prompted("flux1-redux-dev"), {"image_prompts": []}),
    "flux image prompts": Case(flux_prompts, FLUX | prompted("one", "instant"), {"image_prompts": []}),
    "flux_fill": Case(partial(family, tiny=SHOWN_FAMILIES["flux_fill"]), FLUX | {"image": image(), "mask": mask()}),
    "flux_control": Case(partial(family, tiny=SHOWN_FAMILIES["flux_control"]), FLUX | {"image": image()}),
    "flux reference": Case(named("flux_dev"), FLUX | {"reference": image(32, 96)}, {"reference": None}),
    "flux2 references": Case(
        named("flux2_klein"), FLUX | {"cfg": 1.0, "reference": [image(32, 96), image(64, 64)]}, {"reference": None}
    ),
    "qwen edit": Case(partial(family, tiny=SEEING), GUIDED | ONE | {"reference": image(32, 96)}),
    "ltx2 isolation": Case(partial(family, tiny=SOUNDING), VIDEO | ONE | options(isolation=3)),
    **{
        f"{name} {next(iter(on))}": Case(named(name), FLUX | more | options(**on), {"options": {}})
        for name, more in (("flux_dev", {}), ("hunyuan_video", {"frames": 5}), ("flux2_klein", {"cfg": 1.0}))
        for on in ({"fbcache": 5.0}, {"rope": {"scale_x": 0.5}}, {"block_scale.blocks": "D00*0.5"})
    },
    "flux_dev LoRA that changes": Case(flux_lora, FLUX | {"loras": ["style:0.2@0,0.8@0.5"]}, {"loras": []}),
    "flux_dev teacache": Case(partial(family, tiny=DEEP), FLUX | {"steps": 5} | options(teacache=5.0), {"options": {}}),
    "qwen_image ControlNet, 4 GPUs": Case(
        partial(with_control, case="qwen_image"), GUIDED | {"gpus": 4} | control(), {"controls": []}
    ),
    **{
        f"wan {next(iter(on))}, 4 GPUs": Case(named("wan_t2v"), VIDEO | {"gpus": 4} | options(**on), {"options": {}})
        for on in (SKIPPED, {"fbcache": 5.0})
    },
    **{
        f"{name} fbcache": Case(named(name), fields | ONE | options(fbcache=5.0), {"options": {}})
        for name, fields in (("z_image", FLUX), ("qwen_image", GUIDED), ("ltxv", VIDEO), ("wan_t2v", VIDEO))
    },
}  # fmt: skip


def length(video: VideoFacts | None) -> dict[str, Any]:
    """The frames of two latent cells."""
    return {} if video is None else {"frames": 1 + video.multiple}


#: the other families with blocks that options skip, on as many GPUs as divide their tokens
SKIPPING = {
    f"{name} {next(iter(on))}": Case(
        named(name),
        GUIDED | {"height": 64, "cfg": 2.0, "gpus": 4} | length(family.sampling.video) | options(**on),
        {"options": {}},
    )
    for name, family in sorted(running_families().items())
    if name in ALL_FAMILIES.keys() - {"z_image", "qwen_image", "ltxv", "wan_t2v", "flux_dev", "flux2_klein"}
    if family.sampling.sequence is not None and "fbcache" in supported_options(family.sampling)
    for on in (SKIPPED, {"fbcache": 5.0})
}
#: one of each kind of what acts, for each commit
USUAL = (
    "sd1 ControlNet", "sd1 LoRA of a text", "wan slg", "flux ControlNet", "flux image prompts", "flux reference",
    "z_image fbcache",
)  # fmt: skip


@each_case("name", USUAL)
def test_what_acts_in_a_run_acts_in_a_shared_one(name: str, pool: AskedMembers, tmp_path: Path) -> None:
    assert_made_alike({**BY_TEXTS, **BY_TOKENS}[name], pool, tmp_path, exact=name in BY_TEXTS)


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_gang_features.py")
@each_case("name", BY_TEXTS)
def test_members_that_divide_texts_make_the_same_bytes(name: str, pool: AskedMembers, tmp_path: Path) -> None:
    assert_made_alike(BY_TEXTS[name], pool, tmp_path, exact=True)


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_gang_features.py")
@each_case("name", BY_TOKENS)
def test_members_that_divide_tokens_make_the_same_latents(name: str, pool: AskedMembers, tmp_path: Path) -> None:
    assert_made_alike(BY_TOKENS[name], pool, tmp_path, exact=False)


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_gang_features.py")
@each_case("name", SKIPPING)
def test_members_that_divide_tokens_skip_the_same_blocks(name: str, pool: AskedMembers, tmp_path: Path) -> None:
    assert_made_alike(SKIPPING[name], pool, tmp_path, exact=False)


def test_members_with_another_controlnet_are_named(pool: AskedMembers, tmp_path: Path) -> None:
    """Its weights, whether they stream or not, and its image: either would make a wrong image without an error."""
    with_control(tmp_path, "qwen_image")
    fields = {**GUIDED, **control(), "gpus": 2}
    for streams in (False, True):
        alone = pool.alone(tmp_path, fields, streams)
        assert_shared(alone, pool.shared(tmp_path, fields, streams=streams), exact=True)
        for answer in pool.shared(tmp_path, fields, changed=1, streams=streams):
            assert "GangsDiffer: gpu-1 (rank 1) has other patched weights" in answer.error, answer.error
            assert "in ControlNet 1 " in answer.error, answer.error
    others = [fields, {**fields, "controls": [{"model": "canny", "image": IMAGES["canny"], "strength": 0.7}]}]
    for answer in pool.shared(tmp_path, fields, others=others):
        assert "was asked for another run" in answer.error, answer.error
