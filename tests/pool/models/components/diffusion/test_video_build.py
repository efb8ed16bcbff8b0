"""Models for video and audio, Stable Cascade and special UNets: a tiny published file becomes diffusers' own module,
and the file again."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modelpool.pool.families.definitions import all_definitions, defined_unets, ltxv
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.diffusion.audio_seconds import plan_seconds
from modelpool.pool.models.components.diffusion.build_diffusion_model import architecture_of, plan_diffusion_model
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseKind
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.each_case import each_case
from tests.nearly import assert_nearly
from tests.pool.damaged_shapes import damaged
from tests.pool.families.definitions.in_tables import video_families_in_tables
from tests.pool.models.components.diffusion.video_cases import CASES, Case, ModelKwargs
from tests.pool.zoo.case import quiet_libraries

GOLDEN = Path(__file__).resolve().parents[4] / "golden"
DETECTION = json.loads((GOLDEN / "detection.json").read_text())
KEYS = json.loads(gzip.decompress((GOLDEN / "detection_keys.json.gz").read_bytes()))
#: those of UNets and of Stable Cascade that have a call of their own
SAMPLING = {unet.name: unet.family.sampling for unet in defined_unets() if unet.build is not None}
ROWS = {name: ARCHITECTURES[name] for name in (*video_families_in_tables(), *SAMPLING)}
NOISE = {
    **{name: family.sampling.noise for name, family in video_families_in_tables().items()},
    **{name: facts.noise for name, facts in SAMPLING.items()},
}
#: inputs that calls accept and run without
OPTIONAL = {each.name: each.build.optional_inputs for each in all_definitions() if each.build is not None}
#: noise with levels that are numbers of a table; models of other noise read at most 1
TABLED = (NoiseKind.SCALED_LINEAR, NoiseKind.ZERO_TERMINAL, NoiseKind.LINEAR)
#: lists of published keys that are built here
BUILT = [
    "sd_x4_upscaler", "svd_img2vid", "sv3d_u", "sv3d_p", "wan21_camera_14b", "wan22_camera_14b",
    "stable_cascade_c",
    "stable_cascade_c_lite", "stable_cascade_b", "stable_audio_1", "mochi", "ltxv_2b", "hunyuan_video",
    "hunyuan_video_skyreels_i2v", "hunyuan_video_1.5", "cosmos_7b_t2v", "cosmos_7b_i2v", "cosmos_predict2_2b_t2i",
    "cosmos_predict2_2b_i2v", "wan21_t2v_1.3b", "wan21_t2v_14b", "wan21_flf2v_14b", "wan21_fun_control_14b",
    "wan22_ti2v_5b",
]  # fmt: skip
#: families of which diffusers has no class, and so no folders
NOT_IN_DIFFUSERS = ("wan22_camera", "wan21_camera", "wan22_fun_control")
#: tensors of theirs that no computation reads
UNREAD = {"transformer.rotary_pos_emb.inv_freq"}
#: published parts that these tests' narrow files need not have, as patterns
NOT_IN_TESTS = {
    "wan21_i2v": r"$",
    "cascade_b": r"(down|up)_repeat_mappers|up_upscalers",
    "ltxv": r"$",
}
#: weights without a part in the result
IDLE = {
    # the last block's texts, which nobody reads
    "mochi": r"transformer_blocks\.2\.attn1\.(add_q_proj|norm_added_q)",
    # without an image its states are nothing
    "hunyuan_video_15": r"image_embedder\.|transformer_blocks\.1\.(ff_c|norm1_c|attn\.(to_add_out|add_q|norm_added_q))",
    # which of one state attention chooses
    "svd": r".*attn2\.(to_q|to_k)",
    "sv3d_u": r".*attn2\.(to_q|to_k)",
    "sv3d_p": r".*attn2\.(to_q|to_k)",
    # without an image there is nothing to map
    "cascade_c": r"clip_img_mapper\.weight",
    "cascade_b": r"pixels_mapper\.0\.weight",
}  # fmt: skip

CASE = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """The shape of each."""
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def plain(case: Case, theirs: Any) -> Any:
    """diffusers' own module in the form that ours is called in: Cosmos is given its channel of padding."""
    if not case.name.startswith("cosmos"):
        return theirs
    plan = plan_diffusion_model({key: tuple(x.shape) for key, x in theirs.state_dict().items()})
    module = plan.architecture.module(**{key: value for key, value in theirs.config.items() if key[0] != "_"})
    module.load_state_dict(theirs.state_dict())
    return module.eval().requires_grad_(False)


@CASE
def test_a_published_file_is_diffusers_module_and_the_file_again(case: Case, tmp_path: Path) -> None:
    theirs = case.module()
    file = case.file(theirs)
    save_file(file, tmp_path / "model.safetensors")
    tensors = MappedFile.open(tmp_path / "model.safetensors").tensors()
    plan = plan_diffusion_model(shapes_of(file), config=case.hints or None)
    assert plan.recognised.name == case.name
    ours = plan.build(tensors)
    assert isinstance(ours, type(theirs))
    x, level, told = case.inputs()
    with torch.no_grad(), quiet_libraries():
        expected = plan.call(plain(case, theirs), x, level, told)
        given = plan.call(ours, x, level, told)
    assert expected.shape == x.shape
    assert expected.isfinite().all()
    assert_nearly(given, expected)
    assert set(plan.key_map.unused) == set(case.unused)
    saved = plan.save(ours, tensors)
    assert saved.keys() == file.keys()
    for key, tensor in file.items():
        assert saved[key].dtype == tensor.dtype
        assert torch.equal(saved[key], tensor), key


@CASE
def test_these_weights_all_count(case: Case) -> None:
    """The comparison above would miss a weight that changes nothing: each has a gradient in the result."""
    theirs = plain(case, case.module()).requires_grad_(True)
    x, level, told = case.inputs()
    plan = plan_diffusion_model(shapes_of(case.file(theirs)))
    with quiet_libraries():
        output = plan.call(theirs, x, level, told)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    idle = {name for name, value in theirs.named_parameters() if value.grad is None or not value.grad.any()}
    assert {name for name in idle if not re.match(IDLE.get(case.name, r"$"), name)} == set()


@CASE
def test_what_it_is_told_all_counts(case: Case) -> None:
    """Each thing that the case tells changes the result, and so does the level."""
    module = plain(case, case.module())
    x, level, told = case.inputs()
    plan = plan_diffusion_model(shapes_of(case.file(module)))

    def called(level: torch.Tensor, told: ModelKwargs) -> torch.Tensor:
        with torch.no_grad(), quiet_libraries():
            return plan.call(module, x, level, told)

    given = called(level, told)
    assert not torch.equal(given, called(level * 0.5, told))
    for name, value in told.items():
        other = ~value if value.dtype == torch.bool else value + 1
        if name == "image_mask":
            other = 1 - value
        if name == "context_mask":
            other = torch.ones_like(value)
        if name == "context_2_mask":
            other = torch.ones_like(value)
        assert not torch.equal(given, called(level, {**told, name: other})), name


@CASE
def test_what_padding_says_does_not_count(case: Case) -> None:
    """A text's states behind its end are as good as any others, where the model is told where it ends."""
    module = plain(case, case.module())
    x, level, told = case.inputs()
    plan = plan_diffusion_model(shapes_of(case.file(module)))
    for name in [name for name in ("context", "context_2") if f"{name}_mask" in told]:
        other = told[name].clone()
        other[:, -1] += 1
        with torch.no_grad(), quiet_libraries():
            expected, given = plan.call(module, x, level, told), plan.call(module, x, level, {**told, name: other})
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


@CASE
def test_a_file_in_the_naming_of_diffusers_is_built_as_it_is(case: Case) -> None:
    """A part of a folder, on its own, and beside its config.json."""
    if case.name.startswith(NOT_IN_DIFFUSERS):
        return
    theirs = case.module()
    state = dict(theirs.state_dict())
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    x, level, told = case.inputs()
    for config in (case.hints or None, case.config(theirs)):
        plan = plan_diffusion_model(shapes, config=config)
        assert plan.recognised.name == case.name
        ours = plan.build(state)
        with torch.no_grad(), quiet_libraries():
            assert_nearly(plan.call(ours, x, level, told), plan.call(plain(case, theirs), x, level, told))
        assert plan.save(ours, state).keys() == state.keys()
        assert all(key == origin.segments[0].source for key, origin in plan.key_map.origins.items())


def _pattern(key: str) -> str:
    return re.sub(r"\d+", "#", key)


@each_case("name", [name for name, case in CASES.items() if case.golden])
def test_the_layouts_of_these_tests_are_the_published_ones(name: str) -> None:
    """Every key that the test's file has is one of the published list, numbers aside, and the whole list is there."""
    case = CASES[name]
    ours = {_pattern(key) for key in case.file(case.module())}
    listed = {_pattern(key) for key in KEYS[case.golden]}
    assert {key for key in ours - listed if not re.match(NOT_IN_TESTS.get(case.name, "$"), key)} == set()
    assert {key for key in listed - ours if not re.match(NOT_IN_TESTS.get(case.name, "$"), key)} == set()


@each_case("entry", BUILT)
def test_published_sizes_are_planned_whole(entry: str) -> None:
    """The module of the configuration that the shapes tell has the keys and shapes that the file becomes."""
    plan = plan_diffusion_model({key: tuple(shape) for key, shape in KEYS[entry].items()})
    assert plan.empty().state_dict().keys() == plan.key_map.shapes.keys()
    assert set(plan.key_map.unused) <= UNREAD


def test_all_published_lists_of_these_families_are_built() -> None:
    named = {entry: recognise_diffusion(KEYS[entry]) for entry in KEYS}
    assert {entry for entry, found in named.items() if found is not None and found.name in ROWS} == set(BUILT)


def test_every_row_has_a_case_of_its_architecture() -> None:
    cases = {(architecture_of_case(case).module, architecture_of_case(case).call) for case in CASES.values()}
    assert cases == {(row.module, row.call) for row in ROWS.values()}


def architecture_of_case(case: Case) -> Any:
    """The row that builds a case."""
    found = recognise_diffusion(file_shapes(next(name for name, other in CASES.items() if other is case)))
    assert found is not None
    return architecture_of(found)


@CASE
def test_facts_say_what_the_call_reads(case: Case) -> None:
    """Without anything that must be told the call fails, or makes something else; what the case tells is among what can
    be."""
    family = video_families_in_tables().get(case.name)
    may_read = OPTIONAL[case.name]
    reads = (SAMPLING[case.name] if family is None else family.sampling).reads - may_read
    x, level, told = case.inputs()
    assert reads <= set(told) <= reads | may_read
    module = plain(case, case.module())
    plan = plan_diffusion_model(shapes_of(case.file(module)))
    for name in told:
        if name == "image_context" and name in reads and case.name.startswith("wan"):  # none at all is allowed
            unseen = {key: value for key, value in told.items() if key != name}
            with torch.no_grad():
                whole, other = plan.call(module, x, level, told), plan.call(module, x, level, unseen)
            assert not torch.allclose(whole, other, atol=1e-4)
        elif name in reads and not (name == "frame_rate" and case.name.startswith("cosmos2")):
            with pytest.raises((KeyError, RuntimeError, ValueError, AttributeError, TypeError)), quiet_libraries():
                plan.call(module, x, level, {key: value for key, value in told.items() if key != name})
    optional = {key: value for key, value in told.items() if key in reads}
    if "image" not in told or "image" in reads:
        with torch.no_grad(), quiet_libraries():
            assert plan.call(module, x, level, optional).isfinite().all()
    if family is not None:
        assert (family.sampling.noise.kind in TABLED) == (level.item() > 1)


def test_how_frames_of_ltx_stand_in_time() -> None:
    """As the metadata of its file says; models of more blocks than the first have it whatever is said."""
    causal = {"causal_temporal_positioning": True}
    assert (
        ltxv.metadata_configuration({"config": json.dumps({"transformer": causal, "vae": {}}), "format": "pt"})
        == causal
    )
    for nothing in ("", "{", "[]", '{"transformer": []}', '{"transformer": {"causal_temporal_positioning": "yes"}}'):
        assert ltxv.metadata_configuration({"config": nothing}) == {}
    assert ltxv.metadata_configuration({}) == {}
    published = {key: tuple(shape) for key, shape in KEYS["ltxv_2b"].items()}
    assert not counts_causally(published)
    assert counts_causally(published, causal)
    last = {key: shape for key, shape in published.items() if key.startswith("transformer_blocks.27.")}
    deeper = published | {key.replace(".27.", ".28."): shape for key, shape in last.items()}
    assert counts_causally(deeper)


def counts_causally(shapes: dict[str, Shape], config: Mapping[str, Any] | None = None) -> bool:
    """Whether an LTX-Video of `shapes` counts its frames from a single one."""
    module: Any = plan_diffusion_model(shapes, config=config).empty()
    return bool(module.config.causal_temporal_positioning)


def test_a_text_that_is_too_long_for_wan_is_refused() -> None:
    case = CASES["wan_t2v"]
    module = case.module()
    plan = plan_diffusion_model(file_shapes("wan_t2v"))
    x, level, told = case.inputs()
    with pytest.raises(UnusableField, match="context: found 513, expected no more than 512 tokens"):
        plan.call(module, x, level, {"context": told["context"][:, :1].expand(-1, 513, -1)})


def test_models_of_one_layout_that_diffusers_cannot_build_are_told_by_name() -> None:
    for entry in ("wan22_s2v_14b", "wan21_humo_17b"):
        with pytest.raises(UnknownArchitecture, match=r"recognised as .*, which cannot be built"):
            plan_diffusion_model({key: tuple(shape) for key, shape in KEYS[entry].items()})


def test_views_of_frames_that_are_alike_are_what_the_class_would_tell_all() -> None:
    """Against diffusers' own class, given the whole vector in place of its numbers; and each frame has its own."""
    case = CASES["sv3d_p"]
    ours = case.module()
    plain_class = diffusers.UNetSpatioTemporalConditionModel(
        **{key: value for key, value in ours.config.items() if key[0] != "_"}
    )
    plain_class.load_state_dict(ours.state_dict())
    plan = plan_diffusion_model(file_shapes("sv3d_p"))
    x, level, told = case.inputs()
    alike = told["numbers"][:, :1].expand(-1, 3, -1)
    vector = torch.cat(
        [
            diffusers.models.embeddings.Timesteps(width, True, downscale_freq_shift=0)(alike[:, 0, i])
            for i, width in enumerate((256, 512, 512))
        ],
        dim=1,
    )
    object.__setattr__(plain_class, "add_time_proj", lambda _: vector.flatten())
    with torch.no_grad():
        expected = plan.call(plain_class, x, level, {**told, "numbers": alike[:, 0]})
        given = plan.call(ours, x, level, {**told, "numbers": alike})
        other = alike.clone()
        other[:, 2, 2] += 0.5
        turned = plan.call(ours, x, level, {**told, "numbers": other})
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    changes = (turned - given).abs().mean(dim=(0, 1, 3, 4))
    assert changes[2] > changes[:2].max() > 0, "the frame that looks elsewhere changes most"
    assert not ours.add_embedding._forward_hooks, "nothing is left over"
    with pytest.raises(UnusableField, match=r"numbers: found \(1, 3\), expected three for each of 3 frames"):
        plan.call(ours, x, level, {**told, "numbers": alike[:, 0]})


#: by field of `NoiseFacts`, what ComfyUI calls it
SETTINGS = {
    "shift": "shift", "sigma_min": "sigma_min", "sigma_max": "sigma_max", "sigma_data": "sigma_data",
    "beta_start": "linear_start", "beta_end": "linear_end",
}  # fmt: skip
#: where facts are not ComfyUI's, as their sources say
OTHER_SETTINGS = {
    ("ltxv_2b", "shift"), ("stable_audio_1", "sigma_min"), ("wan22_ti2v_5b", "shift"), ("stable_cascade_c", "shift"),
    ("stable_cascade_c_lite", "shift"), ("wan22_camera_14b", "shift"),
}  # fmt: skip


@each_case("entry", BUILT)
def test_noise_is_what_another_implementation_has(entry: str) -> None:
    golden = DETECTION[entry]["sampling_settings"] or {}
    found = recognise_diffusion(KEYS[entry])
    assert found is not None
    noise = NOISE[found.name]
    told = {field: getattr(noise, field) for field in SETTINGS if hasattr(noise, field)}
    differing = {
        (entry, field) for field, theirs in SETTINGS.items()
        if theirs in golden and field in told and golden[theirs] != told[field]
    }  # fmt: skip
    assert differing == {pair for pair in OTHER_SETTINGS if pair[0] == entry}


def test_a_file_without_what_embeds_seconds_says_so() -> None:
    with pytest.raises(UnknownArchitecture, match=r"found 0 tensors under 'conditioner\.conditioners\.'"):
        plan_seconds({"model.model.x": (3,)})


@cache
def file_shapes(name: str) -> dict[str, Shape]:
    """The shapes of a case's file, without its weights."""
    case = CASES[name]
    return {key: tuple(tensor.shape) for key, tensor in case.publish(case.empty().state_dict()).items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_are_refused_or_something_else_never_another_error(data: st.DataObject) -> None:
    """Tensors missing, of strange shapes, under strange names: a typed error, or a plan of what the file still is."""
    shapes = data.draw(damaged(file_shapes(data.draw(st.sampled_from(list(CASES))))))
    with contextlib.suppress(UnknownArchitecture):
        plan_diffusion_model(shapes).empty()
