"""ControlNets of transformers are built from each published layout, at any size, and saved as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelpool.pool.inference.controlnets.controlnet_kinds import KINDS, evenly, in_proportion, in_turn, kind_of
from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet, plan_controlnet
from modelpool.pool.models.components.common.diffusers_private import differing_keys
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import ControlRef
from tests.pool.inference.controlnets import tiny_controls

Make = Callable[[], Any]
HINT: dict[str, Any] = {"num_single_layers": 0, "patch_size": 2, "conditioning_embedding_channels": 16}
#: title of the kind, a tiny one, and its file
CASES: Mapping[str, tuple[str, Make, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "union": ("Flux", lambda: tiny_controls.flux(num_mode=10), tiny_controls.as_it_is),
    "without single blocks": ("Flux", lambda: tiny_controls.flux(num_single_layers=0), tiny_controls.as_it_is),
    "xlabs": ("Flux, of XLabs", lambda: tiny_controls.flux(**HINT), tiny_controls.xlabs_file),
    "xlabs in diffusers' naming": ("Flux, of XLabs", lambda: tiny_controls.flux(**HINT), tiny_controls.as_it_is),
    "sd3": ("Stable Diffusion 3", tiny_controls.sd3, tiny_controls.as_it_is),
    "sd3 with a mask": (
        "Stable Diffusion 3",
        lambda: tiny_controls.sd3(extra_conditioning_channels=1),
        tiny_controls.as_it_is,
    ),
    "sd35 medium": (
        "Stable Diffusion 3",
        lambda: tiny_controls.sd3(qk_norm="rms_norm", num_layers=2, dual_attention_layers=(0,)),
        tiny_controls.as_it_is,
    ),
    "sd35 large": ("Stable Diffusion 3", tiny_controls.sd35_large, tiny_controls.sd35_file),
    "sd35 large in diffusers' naming": ("Stable Diffusion 3", tiny_controls.sd35_large, tiny_controls.as_it_is),
    "qwen_image": ("Qwen-Image", tiny_controls.qwen_image, tiny_controls.as_it_is),
    "qwen_image, blockwise": ("Qwen-Image, of DiffSynth", tiny_controls.qwen_blockwise, tiny_controls.as_it_is),
    "qwen_image, blockwise with a mask": (
        "Qwen-Image, of DiffSynth",
        lambda: tiny_controls.qwen_blockwise(extra_condition_channels=4),
        tiny_controls.as_it_is,
    ),
    "hunyuan_dit": ("HunyuanDiT", tiny_controls.hunyuan_dit, tiny_controls.as_it_is),
    "z_image": ("Z-Image", tiny_controls.z_image, tiny_controls.as_it_is),
    "z_image 2.1": ("Z-Image", lambda: tiny_controls.z_image("2.1"), tiny_controls.as_it_is),
    "qwen_image with a mask": (
        "Qwen-Image",
        lambda: tiny_controls.qwen_image(extra_condition_channels=4),
        tiny_controls.as_it_is,
    ),
}
#: the sizes of InstantX, Shakker, XLabs and Stability
PUBLISHED: Mapping[str, Make] = {
    "InstantX/FLUX.1-dev-Controlnet-Union": lambda: tiny_controls.flux(
        num_layers=5, num_single_layers=10, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=4096,
        pooled_projection_dim=768, axes_dims_rope=[16, 56, 56], num_mode=10,
    ),
    "Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro-2.0": lambda: tiny_controls.flux(
        num_layers=6, num_single_layers=0, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=4096,
        pooled_projection_dim=768, axes_dims_rope=[16, 56, 56],
    ),
    "XLabs-AI/flux-controlnet-canny-diffusers": lambda: tiny_controls.flux(
        num_layers=2, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=4096,
        pooled_projection_dim=768, axes_dims_rope=[16, 56, 56], **HINT,
    ),
    "InstantX/SD3-Controlnet-Canny": lambda: tiny_controls.sd3(
        num_layers=6, num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536,
        pooled_projection_dim=2048, pos_embed_max_size=192, sample_size=128,
    ),
    "stabilityai/stable-diffusion-3.5-large-controlnet-canny": lambda: tiny_controls.sd3(
        num_layers=19, num_attention_heads=38, joint_attention_dim=None, pooled_projection_dim=2048,
        pos_embed_max_size=None, pos_embed_type=None, use_pos_embed=False, force_zeros_for_pooled_projection=False,
    ),
    "Tencent-Hunyuan/HunyuanDiT-v1.2-ControlNet-Diffusers-Canny": lambda: tiny_controls.hunyuan_dit(
        transformer_num_layers=40, num_attention_heads=16, attention_head_dim=88, hidden_size=1408,
        cross_attention_dim=1024, cross_attention_dim_t5=2048, pooled_projection_dim=1024,
    ),
    "alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union": lambda: tiny_controls.z_image(
        dim=3840, n_heads=30, n_kv_heads=30, control_layers_places=[0, 5, 10, 15, 20, 25]
    ),
    "alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union-2.0": lambda: tiny_controls.z_image(
        "2.0", dim=3840, n_heads=30, n_kv_heads=30, control_layers_places=[*range(0, 30, 2)]
    ),
    "alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union-2.1": lambda: tiny_controls.z_image(
        "2.1", dim=3840, n_heads=30, n_kv_heads=30, control_layers_places=[*range(0, 30, 2)]
    ),
    "InstantX/Qwen-Image-ControlNet-Union": lambda: tiny_controls.qwen_image(
        num_layers=5, num_attention_heads=24, attention_head_dim=128, joint_attention_dim=3584,
        axes_dims_rope=(16, 56, 56),
    ),
}  # fmt: skip


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in tensors.items()}


def as_values(config: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """What `config` says of `names`; lists and tuples are alike, and the width of texts that nothing reads is none."""
    found = {name: config[name] for name in names}
    if found.get("joint_attention_dim", 1) is None:
        del found["caption_projection_dim"]
    if "mlp_ratio" in found:  # said with fewer digits than it is told with
        found["mlp_ratio"] = int(found["mlp_ratio"] * config["hidden_size"])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_each_layout_is_the_module_of_diffusers_and_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    title, make, publish = CASES[name]
    made = tiny_controls.write(tmp_path / "c.safetensors", make, 3, publish)
    tensors = load_file(tmp_path / "c.safetensors")
    plan = plan_controlnet(shapes_of(tensors))
    assert plan.kind.title == title
    assert as_values(plan.config, plan.config) == as_values(made.config, plan.config)
    module = plan.build(tensors)
    assert kind_of(module) is plan.kind
    state = module.state_dict()
    assert state.keys() == made.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in made.state_dict().items())
    saved = plan.save(module, tensors)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_those_of_diffusers(name: str) -> None:
    with torch.device("meta"):
        expected = PUBLISHED[name]()
    plan = plan_controlnet(shapes_of(expected.state_dict()))
    assert as_values(plan.config, plan.config) == as_values(expected.config, plan.config)
    assert not differing_keys(plan.key_map, expected)
    plan.empty()


def test_no_two_kinds_fit_one_file() -> None:
    """But where one comes before the other."""
    for title, make, publish in CASES.values():
        with torch.device("meta"):
            keys = set(publish(make().state_dict()))
        fitting = [kind.title for kind in KINDS if any(signs <= keys for signs in kind.signs)]
        assert fitting[0] == title
        assert len(fitting) == 1 or title == "Flux, of XLabs"


def test_what_is_not_whole_is_refused_by_name() -> None:
    whole = shapes_of(tiny_controls.flux().state_dict())
    without = {key: shape for key, shape in whole.items() if key != "controlnet_single_blocks.0.bias"}
    with pytest.raises(UnknownArchitecture, match=r"a ControlNet for Flux, but 1 parameter has no source, such as"):
        plan_controlnet(without).empty()
    without = {key: shape for key, shape in whole.items() if "attn.norm_q" not in key}
    with pytest.raises(
        UnknownArchitecture, match=r"ControlNet: transformer_blocks.0.attn.norm_q.weight: found no such"
    ):
        plan_controlnet(without)
    odd = {**whole, "transformer_blocks.0.attn.norm_q.weight": (7,)}
    with pytest.raises(UnknownArchitecture, match=r"found head width 7, expected a divisor of 64"):
        plan_controlnet(odd)


@pytest.mark.parametrize("name", CASES)
def test_damaged_shapes_are_refused_or_built(name: str) -> None:
    """Tensors that are missing, of other sizes, of other numbers of dimensions, of no size: never another error."""
    _, make, publish = CASES[name]
    whole, random = shapes_of(publish(make().state_dict())), Random(name)
    keys, refused = sorted(whole), 0
    for _ in range(25):
        shapes = dict(whole)
        for key in random.sample(keys, random.randint(1, 3)):
            shape = list(shapes.pop(key))
            match random.randrange(4):
                case 0 if shape:
                    shape[random.randrange(len(shape))] = random.choice((0, 1, 3, 7))
                case 1:
                    shape = shape[1:]
                case 2:
                    shape = [*shape, 2]
                case _:
                    continue
            shapes[key] = tuple(shape)
        try:
            plan_controlnet(shapes).empty()
        except UnknownArchitecture:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(("version", "refines"), [("2.0", "control_layers"), ("2.1", "control_noise_refiner")])
def test_layers_of_z_image_that_were_never_trained_are_left_out(version: str, refines: str, tmp_path: Path) -> None:
    """Both versions have files with the same tensors."""
    files = {"2.0": tiny_controls.z_image_20_file, "2.1": tiny_controls.as_it_is}
    path = tmp_path / "z.safetensors"
    tiny_controls.write(path, lambda: tiny_controls.z_image(version), 3, files[version])
    opened = OpenControlNet(ControlRef("z", str(path), "00", 1.0, 0.0, 1.0), "cpu")
    assert opened.kind.title == "Z-Image"
    assert opened.module.config.add_control_noise_refiner == refines
    assert (opened.module.control_noise_refiner is None) == (version == "2.0")


def test_samples_go_behind_blocks_as_diffusers_has_them() -> None:
    """5 for 19 and 10 for 38 blocks are InstantX's beside Flux; 6 for 24 beside Stable Diffusion 3."""
    assert [evenly(block, 5, 19) for block in range(19)] == sorted([0, 1, 2, 3] * 4 + [4] * 3)
    assert [evenly(block, 10, 38) for block in range(38)] == sorted([*range(9)] * 4 + [9] * 2)
    assert [in_proportion(block, 6, 24) for block in range(24)] == sorted([*range(6)] * 4)
    assert [in_proportion(block, 19, 38) for block in range(38)] == sorted([*range(19)] * 2)
    assert [in_turn(block, 2, 19) for block in range(19)] == [block % 2 for block in range(19)]
