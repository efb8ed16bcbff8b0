"""A discovered key map does what the converter does that it was discovered from, on every published layout tried.

Exactly: load gives what converting gives, save gives the file back, and a change to a file's tensor lands where
converting the changed file would put it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from diffusers.loaders import single_file_utils as diffusers_names
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelpool.pool.models.components.common.infer_config import unet_config
from modelpool.pool.models.components.common.vae_configs import kl_config
from modelpool.pool.weights.keymaps.key_map import KeyMap, RowRange, discover
from modelpool.pool.weights.keymaps.provenance import UntraceableOperationError
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """A layout and the converter that diffusers has for it. `unused` sources have no place in the module."""

    layout: Layout
    convert: Convert
    unused: tuple[str, ...] = ()


def bare(layout: Layout, prefix: str) -> Layout:
    return {key.removeprefix(prefix): shape for key, shape in layout.items()}


def unet(sizes: layouts.LdmUnet) -> Case:
    layout = layouts.ldm_unet(sizes)
    config: dict[str, object] = {"layers_per_block": sizes.res_blocks}
    if sizes.label_width is not None:
        config["addition_embed_type"] = "text_time"
    return Case(layout, lambda t: diffusers_names.convert_ldm_unet_checkpoint(t, config))


def vae(sizes: layouts.LdmVae) -> Case:
    layout = layouts.ldm_vae(sizes)
    config = kl_config(bare(layout, "first_stage_model."))
    return Case(layout, lambda t: diffusers_names.convert_ldm_vae_checkpoint(t, config))


def open_clip() -> Case:
    prefix = "conditioner.embedders.1.model."
    return Case(
        layouts.open_clip(hidden=64, layers=2, mlp=128),
        lambda t: diffusers_names.convert_open_clip_checkpoint(None, t, prefix=prefix),
        unused=(f"{prefix}logit_scale",),
    )


def clip_l() -> Case:
    return Case(layouts.hf_clip(layouts.CLIP_L), diffusers_names.convert_ldm_clip_checkpoint)


def flux() -> Case:
    # the converter only knows the published width; two blocks of it show every kind of tensor
    return Case(layouts.flux(1, 1), diffusers_names.convert_flux_transformer_checkpoint_to_diffusers)


def sd3(*, dual_blocks: int) -> Case:
    layout = layouts.sd3(depth=3, positions=8, qk_norm=dual_blocks > 0, dual_blocks=dual_blocks)
    return Case(layout, diffusers_names.convert_sd3_transformer_checkpoint_to_diffusers)


CASES: dict[str, Callable[[], Case]] = {
    "sd15 unet": lambda: unet(layouts.SD15_UNET),
    "sd21 unet": lambda: unet(layouts.SD21_UNET),
    "sdxl unet": lambda: unet(layouts.SDXL_UNET),
    "sdxl refiner unet": lambda: unet(layouts.SDXL_REFINER_UNET),
    "tiny unet": lambda: unet(layouts.TINY_UNET),
    "sd15 vae": lambda: vae(layouts.SD15_VAE),
    "sd3 vae": lambda: vae(layouts.LdmVae(latent_channels=16, quant_convs=False)),
    "tiny vae": lambda: vae(layouts.TINY_VAE),
    "clip-l": clip_l,
    "clip-g": open_clip,
    "flux": flux,
    "sd3": lambda: sd3(dual_blocks=0),
    "sd3.5": lambda: sd3(dual_blocks=2),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def marked(layout: Layout) -> dict[str, Tensor]:
    """A number for each row of each tensor, in the tensor's shape but without its memory.

    Numbers differ from row to row and from tensor to tensor, so a row that went astray shows.
    """
    tensors = {}
    for i, (key, shape) in enumerate(layout.items()):
        rows = shape[0] if shape else 1
        numbers = torch.arange(rows, dtype=torch.int32) + (i << 17)
        tensors[key] = numbers.view(rows, *(1,) * (len(shape) - 1)).expand(shape) if shape else numbers[0]
    return tensors


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal, compared in full where that is quick, else by the first and the last number of each row."""
    if a.shape != b.shape or a.numel() < 1 << 16:
        return torch.equal(a, b)
    ends = [(x.flatten(1)[:, :: x[0].numel() - 1 or 1] if x.dim() > 1 else x) for x in (a, b)]
    return torch.equal(*ends)


def test_loading_is_converting(case: Case) -> None:
    key_map = discover(case.layout, case.convert)
    expected = {k: v for k, v in case.convert(marked(case.layout)).items() if v is not None}
    loaded = key_map.load(marked(case.layout))
    assert loaded.keys() == expected.keys()
    assert key_map.shapes == {key: tuple(value.shape) for key, value in expected.items()}
    assert all(alike(loaded[key], expected[key]) for key in expected)


def test_saving_undoes_loading(case: Case) -> None:
    key_map = discover(case.layout, case.convert)
    file = marked(case.layout)
    saved = key_map.save(key_map.load(file))
    assert key_map.unused == case.unused
    assert saved.keys() == file.keys() - set(case.unused)
    assert all(alike(saved[key], file[key]) for key in saved)


def test_targets_cover_each_row_of_each_source_once(case: Case) -> None:
    key_map = discover(case.layout, case.convert)
    for key, shape in case.layout.items():
        if key in case.unused:
            assert key_map.targets(key) == ()
            continue
        row = 0
        for target in key_map.targets(key):
            assert (target.source_start, target.source_shape) == (row, shape)
            row += target.rows
        assert row == (shape[0] if shape else 1)


def test_a_parameters_rows_lead_back_to_the_parameter(case: Case) -> None:
    """From the parameter to the file and on to the module is the whole parameter, in one piece."""
    key_map = discover(case.layout, case.convert)
    for key in key_map.origins:
        assert key_map.compose(key_map.source_ranges(key)) == (key_map.parameter_range(key),)


def test_through_is_targets_for_a_whole_source(case: Case) -> None:
    key_map = discover(case.layout, case.convert)
    for key in case.layout:
        assert key_map.compose(key_map.full_source(key)) == key_map.targets(key)


SMALL = ("tiny unet", "tiny vae", "clip-g")


@settings(max_examples=30, deadline=None)
@given(data=st.data(), name=st.sampled_from(SMALL))
def test_a_change_lands_where_converting_the_changed_file_puts_it(data: st.DataObject, name: str) -> None:
    """convert(W + D) == convert(W) + place(D), which is what lets a LoRA for the file patch the module."""
    case = CASES[name]()
    key_map = discover(case.layout, case.convert)
    key = data.draw(st.sampled_from([k for k in case.layout if k not in case.unused]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    file = {k: torch.zeros(()).expand(shape) for k, shape in case.layout.items()}
    delta = torch.randn(case.layout[key], generator=generator)
    expected = case.convert({**file, key: file[key] + delta})
    patched = {k: v.clone() for k, v in key_map.load(file).items()}
    for target in key_map.targets(key):
        piece = target.place(delta)
        patched[target.key].narrow(0, target.start, piece.shape[0]).add_(piece)
    assert all(torch.equal(patched[k], expected[k]) for k in patched)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), name=st.sampled_from(SMALL))
def test_a_change_to_a_parameter_lands_in_the_file(data: st.DataObject, name: str) -> None:
    """Placed into the file's tensors and converted, a delta of a parameter's shape is that delta again."""
    case = CASES[name]()
    key_map = discover(case.layout, case.convert)
    key = data.draw(st.sampled_from(sorted(key_map.origins)))
    delta = torch.randn(key_map.shapes[key], generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    file = {k: torch.zeros(()).expand(shape) for k, shape in case.layout.items()}
    for target in key_map.source_ranges(key):
        piece = target.place(delta)
        changed = file[target.key].clone()
        changed.narrow(0, target.start, piece.shape[0]).add_(piece)
        file[target.key] = changed
    converted = case.convert(file)
    assert torch.equal(converted[key], delta)
    assert all(not value.any() for k, value in converted.items() if k != key and value is not None)


def test_flux_and_sd3_maps_have_the_keys_and_shapes_of_their_modules() -> None:
    with torch.device("meta"):
        modules = {
            "flux": FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True),
            "sd3.5": SD3Transformer2DModel(
                num_layers=3,
                num_attention_heads=24,
                caption_projection_dim=1536,
                pos_embed_max_size=8,
                qk_norm="rms_norm",
                dual_attention_layers=(0, 1),
            ),
        }
    for name, module in modules.items():
        case = CASES[name]()
        actual = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        assert discover(case.layout, case.convert).shapes == actual, name


def test_a_fused_source_is_cut_into_its_parts_and_swapped_halves_are_swapped() -> None:
    """Flux by hand: q, k and v are thirds of one tensor; the last layer's scale and shift change places."""
    hidden = 3072
    case = CASES["flux"]()
    key_map = discover(case.layout, case.convert)
    fused = key_map.targets("double_blocks.0.img_attn.qkv.weight")
    assert [(t.key, t.source_start, t.rows, t.start) for t in fused] == [
        ("transformer_blocks.0.attn.to_q.weight", 0, hidden, 0),
        ("transformer_blocks.0.attn.to_k.weight", hidden, hidden, 0),
        ("transformer_blocks.0.attn.to_v.weight", 2 * hidden, hidden, 0),
    ]
    swapped = key_map.targets("final_layer.adaLN_modulation.1.weight")
    assert [(t.key, t.source_start, t.start) for t in swapped] == [
        ("norm_out.linear.weight", 0, hidden),
        ("norm_out.linear.weight", hidden, 0),
    ]


def test_loading_copies_nothing_but_joined_rows() -> None:
    case = unet(layouts.TINY_UNET)
    file = {key: torch.empty(shape) for key, shape in case.layout.items()}
    storages = {tensor.untyped_storage().data_ptr() for tensor in file.values()}
    loaded = discover(case.layout, case.convert).load(file)
    assert {tensor.untyped_storage().data_ptr() for tensor in loaded.values()} <= storages


def find(key_map: KeyMap, key: str) -> list[tuple[str, int, int]]:
    return [(s.source, s.start, s.rows) for s in key_map.origins[key].segments]


@given(cut=st.integers(0, 6), step=st.integers(1, 6))
def test_pieces_that_continue_each_other_are_one(cut: int, step: int) -> None:
    """Splitting and joining again is no change, however it is written."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        x = tensors["x"]
        return {
            "sliced": torch.cat([x[:cut], x[cut:]]),
            "split": torch.cat(x.split(step)),
            "ends": torch.cat([x[-2:], x[:-2]]),
            "turned": x.T.contiguous(),
            "back": x.t().permute(1, 0),
            "middle": x.narrow(0, 1, 3),
        }

    key_map = discover({"x": (6, 4)}, convert)
    assert find(key_map, "sliced") == find(key_map, "split") == [("x", 0, 6)]
    assert find(key_map, "ends") == [("x", 4, 2), ("x", 0, 4)]
    assert find(key_map, "middle") == [("x", 1, 3)]
    x = torch.randn(6, 4)
    expected = convert({"x": x})
    assert all(torch.equal(value, expected[key]) for key, value in key_map.load({"x": x}).items())


REFUSED: dict[str, Convert] = {
    "arithmetic": lambda t: {"y": t["x"] * 2},
    "columns": lambda t: {"y": t["x"][:, :2]},
    "columns joined": lambda t: {"y": torch.cat([t["x"], t["x"]], dim=1)},
    "one column": lambda t: {"y": t["x"].select(1, 2)},
    "every second row": lambda t: {"y": t["x"][::2]},
    "made up": lambda t: {"y": torch.zeros(3)},
    "joined with made up": lambda t: {"y": torch.cat([t["x"], torch.zeros(2, 4)])},
    "pieces turned": lambda t: {"y": torch.cat([t["x"][3:], t["x"][:3]]).t()},
    "rows of a turned tensor": lambda t: {"y": t["x"].t()[:2]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_converter_that_does_more_than_move_rows_is_refused(name: str) -> None:
    with pytest.raises(UntraceableOperationError):
        discover({"x": (6, 4)}, REFUSED[name])


def test_a_parameter_without_rows_of_a_source_cannot_be_saved_in_part() -> None:
    key_map = discover({"x": (6, 4)}, lambda t: {"y": t["x"][:3]})
    with pytest.raises(AssertionError, match="belong to no parameter"):
        key_map.save({"y": torch.zeros(3, 4)})


def test_two_parameters_may_share_a_source() -> None:
    """Tied weights: saved once, patched in both places."""
    key_map = discover({"x": (6, 4)}, lambda t: {"a": t["x"], "b": t["x"]})
    x = torch.randn(6, 4)
    assert torch.equal(key_map.save(key_map.load({"x": x}))["x"], x)
    assert [t.key for t in key_map.targets("x")] == ["a", "b"]


def test_a_change_to_one_of_two_that_share_a_source_is_one_to_both() -> None:
    key_map = discover({"x": (6, 4)}, lambda t: {"a": t["x"], "b": t["x"]})
    assert [t.key for t in key_map.compose(key_map.source_ranges("a"))] == ["a", "b"]


def test_rows_that_overlap_parts_are_cut_and_those_of_no_parameter_left_out() -> None:
    key_map = discover({"x": (8, 4)}, lambda t: {"a": t["x"][:3], "b": t["x"][3:6]})
    middle = RowRange("x", (5, 4), 0, 5, 2)
    assert [(t.key, t.source_start, t.rows, t.start) for t in key_map.compose((middle,))] == [
        ("a", 0, 1, 2),
        ("b", 1, 3, 0),
    ]


def test_turned_rows_go_through_whole() -> None:
    """A delta in the form of a turned parameter goes through a map that turns it back, and one that does not."""
    turned = discover({"x": (6, 4)}, lambda t: {"y": t["x"].t()})
    same = discover({"x": (6, 4)}, lambda t: {"z": t["x"]})
    (into_same,) = same.compose(turned.source_ranges("y"))
    delta = torch.randn(4, 6)
    assert torch.equal(into_same.place(delta), delta.t())
    assert turned.compose(turned.source_ranges("y")) == (turned.parameter_range("y"),)


def test_pieces_of_a_reshaped_parameter_are_placed_in_its_form() -> None:
    """Halves swapped and then reshaped: a delta for the file's tensor arrives as two pieces in the new shape."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": torch.cat([tensors["x"][4:], tensors["x"][:4]]).reshape(6, 2, 2).transpose(1, 2)}

    key_map = discover({"x": (6, 4)}, convert)
    delta = torch.randn(6, 4)
    patched = torch.zeros(6, 2, 2)
    for target in key_map.targets("x"):
        piece = target.place(delta)
        assert piece.shape == (target.rows, 2, 2)
        patched.narrow(0, target.start, target.rows).add_(piece)
    assert torch.equal(patched, convert({"x": delta})["y"])
    assert torch.equal(key_map.save(key_map.load({"x": delta}))["x"], delta)


def test_a_range_that_is_a_whole_parameter_places_a_delta_as_it_is() -> None:
    case = vae(layouts.TINY_VAE)
    key_map = discover(case.layout, case.convert)
    key = "encoder.mid_block.attentions.0.to_q.weight"
    delta = torch.randn(64, 64)
    assert key_map.parameter_range(key).place(delta) is delta
    with pytest.raises(AssertionError):
        key_map.parameter_range(key).place(torch.randn(64, 64, 1, 1))


def test_configurations_of_the_layouts_are_what_the_converters_need() -> None:
    """The converters take a few fields of the configuration; those inferred from shapes give the same map."""
    layout = layouts.ldm_unet(layouts.SD15_UNET)
    config = unet_config(bare(layout, "model.diffusion_model."))
    inferred = discover(layout, lambda t: diffusers_names.convert_ldm_unet_checkpoint(t, config))
    assert inferred.origins == discover(layout, unet(layouts.SD15_UNET).convert).origins
