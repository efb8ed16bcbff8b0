"""Every kind of VAE is built from its published single file alone, and is diffusers' own module on the same weights.

To the last digits in what it decodes and encodes, since kernels of some processors add in another order where a weight
lies at another place in memory; exactly in the file that it is saved as. The layouts that the files are written in are
held against the lists of published keys.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modelpool.pool.families.detection.vaes import HUNYUAN_IMAGE_REFINER, recognise_vae
from modelpool.pool.models.components.common import diffusers_private as private_names
from modelpool.pool.models.components.common.diffusers_private import ConverterChangedError
from modelpool.pool.models.components.vae import vae_classes as classes
from modelpool.pool.models.components.vae.build_vae import plan_vae
from modelpool.pool.models.components.vae.vae_classes import ARCHITECTURES, VaeArchitecture, self_test
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.each_case import each_case
from tests.nearly import assert_nearly
from tests.pool.damaged_shapes import damaged
from tests.pool.models.components.vae import published
from tests.pool.models.components.vae.cases import CASES, Case, decode, encode

GOLDEN = Path(__file__).resolve().parents[4] / "golden"
KEYS = json.loads(gzip.decompress((GOLDEN / "vae_keys.json.gz").read_bytes()))
#: golden lists without an architecture in diffusers
NOT_BUILT = {"hunyuan_video_1.5", "hunyuan3d", "pixel_space", "taehv_hunyuan", "taew2_2"}

#: weights without a part in what is computed: one of Stable Cascade's codes is the nearest to no latent
IDLE = {
    "cascade_a": ("vquantizer.embedding.weight",),
    # images have one frame
    "qwen_image_21": (".time_conv.weight", ".time_conv.bias"),
    "qwen_image_layered": (".time_conv.weight", ".time_conv.bias"),
}

CASE = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


@CASE
def test_a_published_file_is_diffusers_module_and_the_file_again(case: Case, tmp_path: Path) -> None:
    theirs = case.module()
    file = case.file(theirs)
    save_file(file, tmp_path / "vae.safetensors")
    tensors = MappedFile.open(tmp_path / "vae.safetensors").tensors()
    plan = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()})
    assert plan.facts.name == case.name
    ours = plan.build(tensors)
    # Qwen-Image's class is another name of Wan's
    assert type(ours).__name__.replace("Wan", "QwenImage") == type(theirs).__name__.replace("Wan", "QwenImage")
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(case.latent, generator=generator)
    pixels = torch.randn(case.pixels, generator=generator).clamp(-1, 1)
    assert_nearly(decode(case, ours, latents), decode(case, theirs, latents))
    assert_nearly(encode(ours, pixels), encode(theirs, pixels))
    assert set(plan.key_map.unused) == set(case.unused)
    saved = plan.save(ours, tensors)
    assert saved.keys() == file.keys()
    for key, tensor in file.items():
        assert saved[key].dtype == tensor.dtype
        assert torch.equal(saved[key], tensor), key


@CASE
def test_these_weights_all_count(case: Case) -> None:
    """The comparison above would miss a weight that changes nothing: each has a gradient in what is computed."""
    theirs = case.module().requires_grad_(True)
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(case.latent, generator=generator)
    pixels = torch.randn(case.pixels, generator=generator).clamp(-1, 1)
    outputs = decode(case, theirs, latents), encode(theirs, pixels)
    assert all(output.isfinite().all() for output in outputs)
    sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs).backward()
    idle = {name for name, value in theirs.named_parameters() if value.grad is None or not value.grad.any()}
    assert {name for name in idle if not name.endswith(IDLE.get(case.name, ()))} == set()


@pytest.mark.parametrize("name", ["kl", "wan21", "ltx_v1"])
def test_a_prefix_inside_a_checkpoint_changes_nothing(name: str) -> None:
    case = CASES[name]
    theirs = case.module()
    file = {f"vae.{key}": tensor for key, tensor in case.file(theirs).items()} | {"model.x.weight": torch.ones(3)}
    plan = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()}, "vae.")
    ours = plan.build(file)
    latents = torch.ones(case.latent)
    assert_nearly(decode(case, ours, latents), decode(case, theirs, latents))
    assert plan.save(ours, file).keys() == file.keys() - {"model.x.weight"}


def _pattern(key: str) -> str:
    return re.sub(r"\d+", "#", key)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.golden], ids=lambda case: case.golden)
def test_the_layouts_of_these_tests_are_the_published_ones(case: Case) -> None:
    """Every key that the test's file has is one of the published list, numbers aside; and most of the list is there."""
    ours = {_pattern(key) for key in case.file(case.module())}
    listed = {_pattern(key) for key in KEYS[case.golden]}
    assert ours <= listed
    absent = {key for key in listed - ours if "shortcut" not in key and "per_channel_statistics" not in key}
    assert not absent or len(absent) <= len(listed) // 10, sorted(absent)


@pytest.mark.parametrize("entry", [entry for entry in KEYS if entry not in NOT_BUILT])
def test_published_sizes_are_planned_whole(entry: str) -> None:
    """The module of the configuration that the shapes tell has the keys and shapes that the file becomes."""
    shapes = {key: tuple(shape) for key, (shape, _) in KEYS[entry].items()}
    facts = recognise_vae(shapes)
    assert facts is not None
    self_test(facts, shapes)
    assert plan_vae(shapes).facts == facts, "structure and table disagree"


@CASE
def test_sizes_are_those_that_the_module_has(case: Case) -> None:
    """Pixels to latents and back by the plan's figures, where no published table could know them."""
    module = case.module()
    facts = plan_vae({key: tuple(tensor.shape) for key, tensor in case.file(module).items()}).facts
    latents, pixels = torch.zeros(case.latent), torch.zeros(case.pixels)
    decoded, encoded = decode(case, module, latents), encode(module, pixels)
    folded = 2 if case.name == "flux2" else 1  # its module works on latents that are not folded yet
    assert facts.latent_channels == latents.shape[1] * folded**2
    first_side = 3 if facts.dimensions == 3 else 2
    if facts.dimensions == 3:
        assert decoded.shape[2] == facts.decoded_frames(latents.shape[2])
        ratio = facts.temporal_ratio
        assert encoded.shape[2] == (pixels.shape[2] + ratio - 1) // ratio
    for decoded_side, cells in zip(decoded.shape[first_side:], latents.shape[first_side:], strict=True):
        assert decoded_side * folded == int(cells * facts.decode_ratio)
    for encoded_side, side in zip(encoded.shape[first_side:], pixels.shape[first_side:], strict=True):
        assert encoded_side == int(side / facts.encode_ratio) * folded


@pytest.mark.parametrize("entry", sorted(NOT_BUILT))
def test_what_diffusers_has_no_architecture_for_is_told_by_name(entry: str) -> None:
    shapes = {key: tuple(shape) for key, (shape, _) in KEYS[entry].items()}
    facts = recognise_vae(shapes)
    assert facts is not None
    message = rf"VAE of {re.escape(facts.title)}, for which the installed diffusers has no architecture"
    with pytest.raises(UnknownArchitecture, match=message):
        plan_vae(shapes)


def test_every_architecture_has_a_case() -> None:
    elsewhere = {"hunyuan_image_refiner", "cascade_c_encoder"}  # the second has no decoder: test_cascade_encoder.py
    assert set(ARCHITECTURES) - elsewhere == {case.name for case in CASES.values()}


def test_a_converter_that_drifts_is_told_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["wan21"]
    shapes = {key: tuple(tensor.shape) for key, tensor in case.file(case.module()).items()}
    facts = recognise_vae(shapes)
    assert facts is not None
    right = ARCHITECTURES["wan21"]
    wrong = VaeArchitecture(
        right.module, right.config, lambda t: {k.replace("conv_in", "first"): x for k, x in right.convert(t).items()}
    )
    monkeypatch.setattr(classes, "ARCHITECTURES", {"wan21": wrong})
    with pytest.raises(ConverterChangedError, match=r"4 parameters have no source, such as decoder\.conv_in"):
        self_test(facts, shapes)
    assert private_names.ConverterChangedError is ConverterChangedError


def test_the_refiner_of_hunyuan_image_is_built_where_somebody_says_so() -> None:
    """Its layout is HunyuanVideo 1.5's, its class another."""
    case = CASES["hunyuan_video_15"]
    file = case.file(case.module())
    shapes = {key: tuple(tensor.shape) for key, tensor in file.items()}
    video, image = plan_vae(shapes).build(file), plan_vae(shapes, facts=HUNYUAN_IMAGE_REFINER).build(file)
    assert (type(video).__name__, type(image).__name__) == (
        "AutoencoderKLHunyuanVideo15", "AutoencoderKLHunyuanImageRefiner",
    )  # fmt: skip
    assert video.state_dict().keys() == image.state_dict().keys()


def test_without_a_convolution_at_the_latent_numbers_pass_as_they_are() -> None:
    """Stable Video Diffusion as its training code stores it, against diffusers' module with an identity there."""
    case = CASES["kl_temporal"]
    theirs = case.module()
    channels = theirs.quant_conv.weight.shape[0]
    theirs.quant_conv.weight.copy_(torch.eye(channels)[:, :, None, None])
    theirs.quant_conv.bias.zero_()
    file = {
        key: tensor.contiguous() for key, tensor in published.temporal_without_convolution(theirs.state_dict()).items()
    }
    ours = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()}).build(file)
    pixels = torch.randn(case.pixels, generator=torch.Generator().manual_seed(2))
    assert_nearly(encode(ours, pixels), encode(theirs, pixels))


@pytest.mark.parametrize(
    ("name", "half"),
    [
        *(("kl", "decoder"), ("kl", "encoder"), ("taesd", "decoder"), ("mochi", "decoder"), ("mochi", "encoder")),
        ("dc", "decoder"),
    ],
)
def test_half_a_vae_runs_and_the_other_half_says_what_is_missing(name: str, half: str) -> None:
    case = CASES[name]
    theirs = case.module()
    if name == "mochi":
        file = {key: tensor.contiguous() for key, tensor in published.mochi_half(half)(theirs.state_dict()).items()}
    else:
        wanted = {"decoder": ("decoder.", "post_quant", "taesd_decoder"), "encoder": ("encoder.", "quant_conv")}[half]
        file = {key: tensor for key, tensor in case.file(theirs).items() if key.startswith(wanted)}
    plan = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()})
    assert (plan.facts.has_encoder, plan.facts.has_decoder) == (half == "encoder", half == "decoder")
    ours = plan.build(file)
    latents, pixels = torch.ones(case.latent), torch.ones(case.pixels)
    if half == "decoder":
        assert_nearly(decode(case, ours, latents), decode(case, theirs, latents))
        with pytest.raises(UnknownArchitecture, match=r"has no encoder: use one that has it"):
            encode(ours, pixels)
    else:
        assert_nearly(encode(ours, pixels), encode(theirs, pixels))
        with pytest.raises(UnknownArchitecture, match=r"has no decoder: use one that has it"):
            decode(case, ours, latents)
    assert plan.save(ours, file).keys() == file.keys()


def test_a_relative_of_sanas_with_batch_norms_is_refused() -> None:
    """Its blocks have other activations, which no tensor tells; its running means would be left out."""
    case = CASES["dc"]
    shapes = {key: tuple(tensor.shape) for key, tensor in case.file(case.module()).items()}
    assert plan_vae(shapes).facts.name == "dc"
    with pytest.raises(UnknownArchitecture, match="found batch norms, expected norms by root mean square"):
        plan_vae({**shapes, "decoder.stages.0.op_list.1.main.conv2.norm.running_mean": (8,)})


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_a_half_of_taesd_in_its_own_file_is_recognised_and_runs_as_diffusers_does(half: str) -> None:
    """`taesd_decoder.safetensors` and `taesd_encoder.safetensors` have keys without a prefix."""
    case = CASES["taesd 16 channels"]
    theirs = case.module()
    whole = case.file(theirs)
    file = {key.split(".", 1)[1]: tensor for key, tensor in whole.items() if key.startswith(f"taesd_{half}.")}
    plan = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()})
    assert (plan.facts.name, plan.facts.has_decoder, plan.facts.latent_channels) == ("taesd", half == "decoder", 16)
    ours = plan.build(file)
    if half == "decoder":
        latents = torch.randn(case.latent, generator=torch.Generator().manual_seed(1))
        assert_nearly(decode(case, ours, latents), decode(case, theirs, latents))
    else:
        pixels = torch.rand(case.pixels, generator=torch.Generator().manual_seed(1))
        assert_nearly(encode(ours, pixels), encode(theirs, pixels))


def test_files_that_are_no_vae_or_not_whole_say_so() -> None:
    with pytest.raises(UnknownArchitecture, match=r"its 2 tensors match no known VAE \(the first are a, b\)"):
        plan_vae({"a": (1,), "b": (2,)})
    with pytest.raises(UnknownArchitecture, match=r"its 0 tensors match no known VAE \(the first are none\)"):
        plan_vae({})
    case = CASES["wan21"]
    file = case.file(case.module())
    shapes = {key: tuple(tensor.shape) for key, tensor in file.items()}
    without = {key: shape for key, shape in shapes.items() if key != "decoder.middle.0.residual.2.weight"}
    with pytest.raises(UnknownArchitecture, match=r"Wan 2\.1 or Qwen-Image, but 1 parameter has no source"):
        plan_vae(without).empty()
    with pytest.raises(UnknownArchitecture, match=r"found no encoder\.conv1\.weight, required to infer a size"):
        plan_vae({key: shape for key, shape in shapes.items() if key != "encoder.conv1.weight"})


@cache
def file_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a case's file, without its weights."""
    with torch.device("meta"):
        state = CASES[name].make().state_dict()
    return {key: tuple(tensor.shape) for key, tensor in CASES[name].publish(state).items()}


@each_case("extra", ["surplus.weight", "decoder.surplus.weight", "encoder.surplus", "loss.logvar"])
@each_case("name", CASES)
def test_tensors_that_no_module_has_are_ignored_in_every_family(name: str, extra: str) -> None:
    """The VAEs of Flux 2, LTX-Video, Wan 2.2, HunyuanVideo 1.5 and Stable Cascade refused a file for one of them."""
    shapes = file_shapes(name)
    plain, plan = plan_vae(shapes), plan_vae({**shapes, extra: (1,)})
    module, key_map = plan.fitting()
    assert key_map.origins == plain.fitting()[1].origins
    assert set(key_map.unused) == {*plain.key_map.unused, extra}
    assert module.state_dict().keys() == plain.empty().state_dict().keys()


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_something_else_never_another_error(data: st.DataObject) -> None:
    """Tensors missing, of strange shapes, under strange names: a typed error, or a plan of what the file still is."""
    shapes = data.draw(damaged(file_shapes(data.draw(st.sampled_from(list(CASES))))))
    with contextlib.suppress(UnknownArchitecture):
        plan_vae(shapes).empty()


@pytest.mark.parametrize("name", ["kl", "kl 16 channels", "kl three levels", "flux2"])
@pytest.mark.parametrize("older", [False, True])
def test_a_file_in_the_naming_of_diffusers_is_built_by_its_shapes(name: str, older: bool) -> None:
    """A part of a folder, on its own; with the names that older versions wrote, too."""
    case = CASES[name]
    theirs = case.module()
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"} if older else {}
    file = {}
    for key, tensor in theirs.state_dict().items():
        for new, old in names.items():
            key = key.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        file[key] = tensor
    plan = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()})
    assert (plan.facts.name, plan.facts.layout) == (case.name, "diffusers")
    ours = plan.build(file)
    latents = torch.randn(case.latent, generator=torch.Generator().manual_seed(5))
    assert_nearly(decode(case, ours, latents), decode(case, theirs, latents))
    assert plan.save(ours, file).keys() == file.keys()


def test_a_file_in_the_naming_of_diffusers_that_tells_too_little_says_so() -> None:
    with pytest.raises(UnknownArchitecture, match=r"SeedVR2 in the naming of diffusers, .* next to its config\.json"):
        plan_vae({"decoder.up_blocks.2.upsamplers.0.upscale_conv.weight": (8,)})


def test_a_counter_of_batches_may_be_left_out() -> None:
    case = CASES["flux2"]
    theirs = case.module()
    file = {key: x for key, x in case.file(theirs).items() if not key.endswith("num_batches_tracked")}
    ours = plan_vae({key: tuple(tensor.shape) for key, tensor in file.items()}).build(file)
    assert_nearly(decode(case, ours, torch.ones(case.latent)), decode(case, theirs, torch.ones(case.latent)))
