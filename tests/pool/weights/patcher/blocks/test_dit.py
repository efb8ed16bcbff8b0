"""Options act on diffusion transformers: blocks replaced or patched, inputs and positions changed, nothing left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.transformer_options import RopeOptions, TransformerOptions
from modelpool.pool.weights.options.wrappers import WrapperPoint
from modelpool.pool.weights.patcher.blocks.applied import applied
from modelpool.pool.weights.patcher.blocks.diffusers_names import block_lists, self_test
from tests.each_case import each_case
from tests.pool.weights.patcher.blocks.tiny import flux, overlaid, run, sd3, wan
from tests.pool.zoo import build
from tests.pool.zoo.denoisers import DENOISERS
from tests.pool.zoo.image_transformers import IMAGE_TRANSFORMERS
from tests.pool.zoo.video_transformers import VIDEO_TRANSFORMERS

Values = dict[str, Any]
Build = Callable[[], tuple[nn.Module, Values]]
MODELS = pytest.mark.parametrize("build", [flux, sd3, wan])


def with_options(module: nn.Module, inputs: Values, transformer: TransformerOptions) -> Tensor:
    with applied(module, ModelOptions(transformer)):
        return run(module, inputs)


def keys_of(module: nn.Module) -> list[tuple[str, int]]:
    return [(kind, n) for kind, blocks in block_lists(module) for n, _ in enumerate(blocks)]


def test_diffusers_still_is_what_options_act_on() -> None:
    self_test()


@MODELS
def test_identity_replacements_and_patches_change_no_bit(build: Build) -> None:
    module, inputs = build()
    plain = run(module, inputs)
    seen: list[tuple[str, int]] = []
    options = TransformerOptions()
    for key in keys_of(module):

        def identity(args: Values, more: Values, key: tuple[str, int] = key) -> Values:
            seen.append(key)
            return more["original_block"](args)

        options = options.with_block_replace(identity, *key)
    options = options.with_double_block_patch(lambda args: args).with_post_input_patch(lambda args: args)
    assert torch.equal(with_options(module, inputs, options), plain)
    assert seen == keys_of(module)
    assert overlaid(module) == []
    assert torch.equal(run(module, inputs), plain)


def test_a_skipped_block_is_a_model_without_it() -> None:
    module, inputs = flux()
    shorter = copy.deepcopy(module)
    shorter.transformer_blocks = nn.ModuleList([module.transformer_blocks[0]])
    shorter.single_transformer_blocks = nn.ModuleList([module.single_transformer_blocks[1]])
    options = TransformerOptions()
    options = options.with_block_replace(lambda args, more: {"img": args["img"], "txt": args["txt"]}, "double_block", 1)
    options = options.with_block_replace(lambda args, more: {"img": args["img"]}, "single_block", 0)
    assert torch.equal(with_options(module, inputs, options), run(shorter, inputs))


@pytest.mark.parametrize("build", [sd3, wan])
def test_a_block_skipped_elsewhere_is_a_model_without_it_too(build: Build) -> None:
    module, inputs = build()
    shorter = copy.deepcopy(module)
    name = "transformer_blocks" if build is sd3 else "blocks"
    blocks = getattr(module, name)
    setattr(shorter, name, nn.ModuleList([blocks[0], *blocks[2:]]))

    def skip(args: Values, more: Values) -> Values:
        return {name: args[name] for name in ("img", "txt") if name in args}

    options = TransformerOptions().with_block_replace(skip, "double_block", 1)
    assert torch.equal(with_options(module, inputs, options), run(shorter, inputs))


def test_a_single_block_sees_text_and_image_as_one_the_text_first() -> None:
    module, inputs = flux()
    shapes: list[tuple[int, ...]] = []

    def note(args: Values, more: Values) -> Values:
        shapes.append(tuple(args["img"].shape))
        return more["original_block"](args)

    with_options(module, inputs, TransformerOptions().with_block_replace(note, "single_block", 0))
    assert shapes == [(2, 7 + 16, 32)]


def test_a_double_block_patch_comes_after_each_double_block() -> None:
    """A constant added after block 0 is what a bias at the end of it would add."""
    module, inputs = flux()
    seen: list[int] = []

    def shift(args: Values) -> Values:
        seen.append(args["block_index"])
        return {"img": args["img"] + 0.5, "txt": args["txt"]} if args["block_index"] == 0 else args

    def shifted(args: Values, more: Values) -> Values:
        out = more["original_block"](args)
        return {**out, "img": out["img"] + 0.5}

    out = with_options(module, inputs, TransformerOptions().with_double_block_patch(shift))
    assert seen == [0, 1]
    same = with_options(module, inputs, TransformerOptions().with_block_replace(shifted, "double_block", 0))
    assert torch.equal(out, same)
    assert not torch.equal(out, run(module, inputs))


def test_a_post_input_patch_changes_what_the_first_block_reads() -> None:
    module, inputs = flux()
    doubled = copy.deepcopy(module)
    doubled.x_embedder.weight.mul_(2.0)
    doubled.x_embedder.bias.mul_(2.0)
    told: list[Values] = []

    def double(args: Values) -> Values:
        told.append(args)
        return {**args, "img": args["img"] * 2.0}

    out = with_options(module, inputs, TransformerOptions().with_post_input_patch(double))
    assert torch.equal(out, run(doubled, inputs))
    assert len(told) == 1
    assert torch.equal(told[0]["img_ids"], inputs["img_ids"])


def test_rope_options_scale_and_shift_the_positions_of_the_image() -> None:
    module, inputs = flux()
    ids = inputs["img_ids"].clone()
    ids[:, 0] = ids[:, 0] + 3.0
    ids[:, 1] = ids[:, 1] * 0.5
    ids[:, 2] = ids[:, 2] * 2.0 + 1.0
    expected = run(module, {**inputs, "img_ids": ids})
    rope = RopeOptions(scale_x=2.0, shift_x=1.0, scale_y=0.5, shift_t=3.0)
    out = with_options(module, inputs, TransformerOptions().with_rope_options(rope))
    assert torch.equal(out, expected)
    assert not torch.equal(out, run(module, inputs))


def test_rope_options_scale_and_shift_the_grid_of_a_video() -> None:
    """Whole positions are in Wan's table; HunyuanVideo's are every second one of a larger grid."""
    options = TransformerOptions().with_rope_options(RopeOptions(scale_x=2.0, shift_x=3.0, shift_t=1.0))
    module, inputs = wan()
    moved = copy.deepcopy(module)
    table: Any = module.rope
    for name in ("freqs_cos", "freqs_sin"):
        rows = getattr(table, name)
        changed = rows.clone()
        changed[:8, : table.t_dim] = rows[1:9, : table.t_dim]
        changed[:8, table.t_dim + table.h_dim :] = rows[3:19:2, table.t_dim + table.h_dim :]
        setattr(moved.rope, name, changed)
    out = with_options(module, inputs, options)
    assert torch.equal(out, run(moved, inputs))
    assert not torch.equal(out, run(module, inputs))
    same = TransformerOptions().with_rope_options(RopeOptions())
    assert torch.equal(with_options(module, inputs, same), run(module, inputs))
    case = build("hunyuanvideo")
    hunyuan: Any = case.module
    rope: Any = hunyuan.rope

    def every_second(x: Tensor) -> list[Tensor]:
        times, rows, columns = (
            x.shape[2] // rope.patch_size_t,
            x.shape[3] // rope.patch_size,
            x.shape[4] // rope.patch_size,
        )
        larger = x.new_zeros(1, 1, x.shape[2] + rope.patch_size_t, x.shape[3], 2 * x.shape[4] + 2 * rope.patch_size)
        grids = (each.view(times + 1, rows, 2 * columns + 2, -1) for each in rope(larger))
        return [grid[1:, :, 3::2][:, :, :columns].reshape(times * rows * columns, -1) for grid in grids]

    moved = copy.deepcopy(hunyuan)
    moved.rope.forward = every_second
    with torch.no_grad():
        expected, plain = moved(**case.inputs)[0], case.run()
        with applied(hunyuan, ModelOptions(options)):
            found = hunyuan(**case.inputs)[0]
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, plain[0])
    assert overlaid(hunyuan) == []


@MODELS
def test_a_block_that_raises_leaves_nothing_on_the_module(build: Build) -> None:
    module, inputs = build()
    plain = run(module, inputs)

    def fail(args: Values, more: Values) -> Values:
        raise RuntimeError("half way")

    options = TransformerOptions().with_block_replace(fail, *keys_of(module)[-1])
    with pytest.raises(RuntimeError, match="half way"):
        with_options(module, inputs, options)
    assert overlaid(module) == []
    assert torch.equal(run(module, inputs), plain)


@MODELS
def test_diffusion_model_wrappers_are_around_the_modules_call(build: Build) -> None:
    module, inputs = build()
    order: list[str] = []

    def wrapper(name: str):
        def around(executor, *args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return executor(*args, **kwargs)

        return around

    options = ModelOptions().with_wrapper(WrapperPoint.DIFFUSION_MODEL, wrapper("outer"))
    options = options.with_wrapper(WrapperPoint.DIFFUSION_MODEL, wrapper("inner"))
    plain = run(module, inputs)
    with applied(module, options):
        assert torch.equal(run(module, inputs), plain)
    assert order == ["outer", "inner"]
    assert overlaid(module) == []


@pytest.mark.parametrize(
    ("build", "options", "named"),
    [
        (flux, TransformerOptions().with_attn1_patch(dict), "attn1_patch"),
        (sd3, TransformerOptions().with_attn2_replace(dict, "input", 1), "attn2"),
        (sd3, TransformerOptions().with_rope_options(RopeOptions(2.0)), "rope_options"),
        (flux, TransformerOptions().with_block_replace(dict, "double_block", 99), "99"),
        (flux, TransformerOptions().with_output_block_patch(dict), "output_block_patch"),
    ],
)
def test_an_option_without_a_place_is_refused_not_ignored(
    build: Build, options: TransformerOptions, named: str
) -> None:
    module, inputs = build()
    with pytest.raises(UnusableField, match=named):
        with_options(module, inputs, options)
    assert overlaid(module) == []


class SingleBlocksOnly(nn.Module):
    """A transformer without double blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.single_transformer_blocks = nn.ModuleList([Block()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.single_transformer_blocks[0](hidden_states)


class Block(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 2.0


def test_a_double_block_patch_without_double_blocks_is_refused() -> None:
    module = SingleBlocksOnly()
    patched = ModelOptions(TransformerOptions().with_double_block_patch(dict))
    with pytest.raises(UnusableField, match="double_block"), applied(module, patched):
        pass
    replaced = TransformerOptions().with_block_replace(lambda args, more: {"img": args["img"] * 3.0}, "single_block", 0)
    with applied(module, ModelOptions(replaced)):
        assert torch.equal(module(torch.ones(1, 1, 1)), torch.full((1, 1, 1), 3.0))


def test_positions_that_a_call_does_not_give_are_not_changed_in_silence() -> None:
    module, inputs = flux()
    options = TransformerOptions().with_rope_options(RopeOptions(scale_x=2.0))
    with pytest.raises(UnusableField, match="rope_options"):
        with_options(module, {**inputs, "img_ids": None}, options)


#: of the zoo's, the models that have no list of blocks
WITHOUT_BLOCKS = {"unet", "unet_sdxl", "unet_svd", "controlnet", "cascade_b", "cascade_c"}
TRANSFORMERS = sorted({*DENOISERS, *IMAGE_TRANSFORMERS, *VIDEO_TRANSFORMERS} - WITHOUT_BLOCKS)


@each_case("family", TRANSFORMERS)
def test_identity_changes_no_bit_of_any_transformer(family: str) -> None:
    """Whatever its blocks call their arguments and in which order they return them."""
    case = build(family)
    keys, seen = keys_of(case.module), []
    with torch.no_grad():
        plain = case.run()
    options = TransformerOptions().with_post_input_patch(lambda args: args)
    for key in keys:

        def identity(args: Values, more: Values, key: tuple[str, int] = key) -> Values:
            seen.append(key)
            assert args["img"].shape[-1] > 1
            return more["original_block"](args)

        options = options.with_block_replace(identity, *key)
    options = options.with_double_block_patch(lambda args: args)
    with torch.no_grad(), applied(case.module, ModelOptions(options)):
        found = case.run()
    assert seen == keys != []
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert overlaid(case.module) == []
