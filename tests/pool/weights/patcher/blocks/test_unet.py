"""Options act on UNets as the mathematics says, in the original's order and block numbers, and leave nothing behind.

Identity patches are equal to no patches bit for bit; replacements are checked against models with other weights and
against hand-written forwards.
"""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import Transformer2DModel
from torch import Tensor, nn

from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.models.components.common.diffusers_private import converter
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.weights.keymaps.key_map import discover
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.run_context import call_facts
from modelpool.pool.weights.options.transformer_options import RopeOptions, TransformerOptions
from modelpool.pool.weights.options.wrappers import WrapperPoint
from modelpool.pool.weights.patcher.blocks.applied import applied
from modelpool.pool.weights.patcher.blocks.diffusers_names import attentions_of, unet_blocks
from tests.pool.models.loading.layouts import LdmUnet, ldm_unet
from tests.pool.weights.patcher.blocks.tiny import overlaid, run, unet_sd1, unet_sdxl

Extra = dict[str, Any]
UNETS = pytest.mark.parametrize("build", [unet_sd1, unet_sdxl], ids=["sd1", "sdxl"])


def with_options(module, inputs, transformer: TransformerOptions) -> Tensor:
    with applied(module, ModelOptions(transformer)):
        return run(module, inputs)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> Tensor:
    q, k, v = (t.view(t.shape[0], -1, extra["n_heads"], extra["dim_head"]).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).reshape(out.shape[0], -1, extra["n_heads"] * extra["dim_head"])


def everything(module: nn.Module, seen: list[tuple[Any, ...]]) -> TransformerOptions:
    """Identity patches at every point of a UNet, which tell where they were called."""

    def at(name: str, results: int):
        def patch(*args: Any) -> Any:
            extra = args[-1]
            seen.append((name, extra.get("block"), extra.get("block_index"), extra.get("transformer_index")))
            return args[0] if results == 1 else args[:results]

        return patch

    options = (
        TransformerOptions()
        .with_attn1_patch(at("attn1", 3))
        .with_attn2_patch(at("attn2", 3))
        .with_attn1_output_patch(at("attn1_out", 1))
        .with_attn2_output_patch(at("attn2_out", 1))
        .with_input_block_patch(at("input", 1))
        .with_input_block_patch(at("input_after", 1), after_skip=True)
        .with_middle_block_patch(at("middle", 1))
        .with_output_block_patch(at("output", 2))
        .with_emb_patch(lambda emb, channels, extra: (seen.append(("emb", channels, None, None)), emb)[1])
    )
    for block in unet_blocks(module):
        has_attention = any(True for layer in block.layers for _ in attentions_of(module.get_submodule(layer)))
        if block.key[0] == "output" and has_attention:
            options = options.with_attn1_replace(softmax_attention, *block.key)
    return options


@UNETS
def test_identity_patches_change_no_bit_and_leave_nothing(build) -> None:
    module, inputs = build()
    plain = run(module, inputs)
    seen: list[tuple[Any, ...]] = []
    assert torch.equal(with_options(module, inputs, everything(module, seen)), plain)
    assert {name for name, *_ in seen} == {
        "attn1", "attn2", "attn1_out", "attn2_out", "input", "input_after", "middle", "output", "emb",
    }  # fmt: skip
    assert overlaid(module) == []
    assert torch.equal(run(module, inputs), plain)


def test_calls_come_in_the_order_of_the_original() -> None:
    module, inputs = unet_sd1()
    seen: list[tuple[Any, ...]] = []
    with_options(module, inputs, everything(module, seen))
    assert [s[0] for s in seen if s[0] == "emb"] == ["emb"]
    blocks = [(name, block) for name, block, *_ in seen if name in ("input", "input_after", "middle", "output")]
    inputs_seen = [(name, ("input", n)) for n in range(4) for name in ("input", "input_after")]
    assert blocks == [*inputs_seen, ("middle", ("middle", 0)), *[("output", ("output", n)) for n in range(4)]]
    attention = [(block, index, counted) for name, block, index, counted in seen if name == "attn2"]
    assert attention == [
        (("input", 1), 0, 0),
        (("middle", 0), 0, 1),
        (("output", 2), 0, 2),
        (("output", 3), 0, 3),
    ]


def test_transformer_blocks_are_counted_inside_their_block_and_over_the_model() -> None:
    module, inputs = unet_sdxl()
    seen: list[tuple[Any, ...]] = []
    with_options(module, inputs, everything(module, seen))
    attention = [(block, index, counted) for name, block, index, counted in seen if name == "attn1"]
    places = [("input", 4), ("input", 5), ("middle", 0), ("output", 0), ("output", 1), ("output", 2)]
    assert attention == [(p, i, 2 * n + i) for n, p in enumerate(places) for i in range(2)]


@pytest.mark.parametrize(
    ("build", "layout", "layers_per_block"),
    [
        (unet_sd1, LdmUnet(32, (1, 2), 1, (1, 0), 1, 32), 1),
        (unet_sdxl, LdmUnet(32, (1, 2), 2, (0, 2), 2, 32, linear_projection=True, label_width=80), 2),
    ],
    ids=["sd1", "sdxl"],
)
def test_block_numbers_are_those_of_the_original_layout(build, layout: LdmUnet, layers_per_block: int) -> None:
    """Found by watching diffusers convert a checkpoint in the original layout, for every parameter of every block."""
    module, _ = build()
    prefix = "model.diffusion_model."
    convert = converter(Architecture.LDM_UNET, {"layers_per_block": layers_per_block}, prefix)
    key_map = discover(ldm_unet(layout, prefix), convert)
    owners = {layer: block.key for block in unet_blocks(module) for layer in block.layers}
    names = {"input": "input_blocks", "middle": "middle_block", "output": "output_blocks"}
    found = 0
    for parameter, origin in key_map.origins.items():
        owner = next((key for layer, key in owners.items() if parameter.startswith(layer + ".")), None)
        source = origin.segments[0].source.removeprefix(prefix)
        assert (owner is None) == (source.split(".")[0] not in names.values()), parameter
        if owner is not None and owner[0] != "middle":
            assert source.startswith(f"{names[owner[0]]}.{owner[1]}."), f"{parameter} is {source}"
            found += 1
    assert found > 50


def test_attn2_replaced_by_zeros_is_a_model_without_that_attention() -> None:
    module, inputs = unet_sd1()
    zeroed = copy.deepcopy(module)
    attention = zeroed.get_submodule("down_blocks.0.attentions.0.transformer_blocks.0.attn2")
    attention.to_out[0].weight.zero_()
    options = TransformerOptions().with_attn2_replace(lambda q, k, v, extra: torch.zeros_like(q), "input", 1)
    assert torch.equal(with_options(module, inputs, options), run(zeroed, inputs))
    indexed = TransformerOptions().with_attn2_replace(lambda q, k, v, extra: torch.zeros_like(q), "input", 1, 0)
    assert torch.equal(with_options(module, inputs, indexed), run(zeroed, inputs))


def test_the_replacement_of_one_transformer_block_is_preferred() -> None:
    module, inputs = unet_sdxl()
    called: list[str] = []

    def replacement(name: str):
        return lambda q, k, v, extra: (called.append(name), softmax_attention(q, k, v, extra))[1]

    options = TransformerOptions().with_attn1_replace(replacement("block"), "input", 4)
    options = options.with_attn1_replace(replacement("second"), "input", 4, 1)
    assert torch.equal(with_options(module, inputs, options), run(module, inputs))
    assert called == ["block", "second"]


def test_attn1_patch_can_add_tokens_to_attend_to() -> None:
    """Keys and values twice are the same average; so is a token of another image's, in a model given both."""
    module, inputs = unet_sd1()

    def twice(q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> tuple[Tensor, Tensor, Tensor]:
        return q, torch.cat([k, k], dim=1), torch.cat([v, v], dim=1)

    out = with_options(module, inputs, TransformerOptions().with_attn1_patch(twice))
    torch.testing.assert_close(out, run(module, inputs), rtol=1e-4, atol=1e-4)
    assert not torch.equal(out, run(module, inputs))


def test_patched_values_alone_act_as_scaled_value_weights() -> None:
    module, inputs = unet_sd1()
    scaled = copy.deepcopy(module)
    for name, sub in scaled.named_modules():
        if name.endswith("attn2.to_v"):
            sub.weight.mul_(2.0)
    options = TransformerOptions().with_attn2_patch(lambda q, k, v, extra: (q, k, v * 2.0))
    torch.testing.assert_close(with_options(module, inputs, options), run(scaled, inputs), rtol=1e-4, atol=1e-4)


def test_output_patch_of_an_attention_comes_after_its_projection() -> None:
    module, inputs = unet_sd1()
    scaled = copy.deepcopy(module)
    for name, sub in scaled.named_modules():
        if name.endswith("attn1.to_out.0"):
            sub.weight.mul_(0.5)
            sub.bias.mul_(0.5)
    options = TransformerOptions().with_attn1_output_patch(lambda out, extra: out * 0.5)
    assert torch.equal(with_options(module, inputs, options), run(scaled, inputs))


def test_output_block_patch_scales_backbone_and_skip_as_freeu_does() -> None:
    """Against diffusers' own FreeU without its Fourier filter: s = 1, so that only the backbone is scaled."""
    module, inputs = unet_sdxl()
    reference = copy.deepcopy(module)
    reference.enable_freeu(s1=1.0, s2=1.0, b1=1.3, b2=1.5)
    scales = {("output", n): 1.3 for n in range(3)} | {("output", n): 1.5 for n in range(3, 6)}

    def freeu(h: Tensor, skip: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        h = h.clone()
        half = h.shape[1] // 2
        h[:, :half] = h[:, :half] * scales[extra["block"]]
        return h, skip

    out = with_options(module, inputs, TransformerOptions().with_output_block_patch(freeu))
    torch.testing.assert_close(out, run(reference, inputs), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out, run(module, inputs), atol=1e-3)


def test_skip_connections_are_split_where_they_were_joined() -> None:
    module, inputs = unet_sdxl()
    widths: list[tuple[int, int]] = []

    def note(h: Tensor, skip: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        widths.append((h.shape[1], skip.shape[1]))
        return h, skip

    with_options(module, inputs, TransformerOptions().with_output_block_patch(note))
    assert widths == [(64, 64), (64, 64), (64, 32), (64, 32), (32, 32), (32, 32)]


def test_an_input_patch_after_the_skip_leaves_the_skip_as_it_was() -> None:
    """Zeros from the last input block on: with and without the skip connection's own."""
    module, inputs = unet_sd1()
    last = ("input", 3)
    skips: dict[bool, Tensor] = {}
    heads: dict[bool, Tensor] = {}
    for after in (False, True):

        def zero(h: Tensor, extra: Extra) -> Tensor:
            return h * 0 if extra["block"] == last else h

        def note(h: Tensor, skip: Tensor, extra: Extra, after: bool = after) -> tuple[Tensor, Tensor]:
            if extra["block"] == ("output", 0):
                heads[after], skips[after] = h, skip
            return h, skip

        options = TransformerOptions().with_input_block_patch(zero, after_skip=after).with_output_block_patch(note)
        with_options(module, inputs, options)
    assert torch.equal(heads[False], heads[True])
    assert not skips[False].any()
    assert skips[True].any()


def test_emb_patch_gets_the_timestep_before_the_pooled_text_is_added() -> None:
    module, inputs = unet_sdxl()
    zeroed = copy.deepcopy(module)
    zeroed.time_embedding.linear_2.weight.zero_()
    zeroed.time_embedding.linear_2.bias.zero_()
    options = TransformerOptions().with_emb_patch(lambda emb, channels, extra: emb * 0)
    assert torch.equal(with_options(module, inputs, options), run(zeroed, inputs))


def test_a_handler_runs_in_place_of_layers_of_its_class() -> None:
    module, inputs = unet_sd1()
    blocks: list[tuple[str, int]] = []

    def skip(layer: Any, x: Tensor, emb: Tensor | None, context: Tensor | None, extra: Extra) -> Tensor:
        blocks.append(extra["block"])
        assert context is not None
        return x

    plain = copy.deepcopy(module)
    for name, sub in plain.named_modules():
        if name.endswith("proj_out") and "attentions" in name:
            sub.weight.zero_()
            sub.bias.zero_()
    options = TransformerOptions().with_forward_timestep_embed_patch(Transformer2DModel, skip)
    assert torch.equal(with_options(module, inputs, options), run(plain, inputs))
    assert blocks == [("input", 1), ("middle", 0), ("output", 2), ("output", 3)]


def test_functions_are_told_of_the_call() -> None:
    module, inputs = unet_sd1()
    told: list[Extra] = []
    options = TransformerOptions().with_middle_block_patch(lambda h, extra: (told.append(extra), h)[1])
    with applied(module, ModelOptions(options)), call_facts(cond_or_uncond=[1, 0], sigmas=torch.tensor([2.0])):
        run(module, inputs)
    assert told[0]["cond_or_uncond"] == [1, 0]
    assert told[0]["original_shape"] == (2, 4, 8, 8)
    assert told[0]["block"] == ("middle", 0)


def test_without_options_nothing_is_put_on_the_module() -> None:
    module, _ = unet_sd1()
    with applied(module, ModelOptions()):
        assert overlaid(module) == []


@pytest.mark.parametrize(
    "point", ["attn1", "attn2", "attn1_out", "attn2_out", "input", "input_after", "middle", "output"]
)
def test_a_patch_that_raises_leaves_nothing_on_the_module(point: str) -> None:
    module, inputs = unet_sd1()
    plain = run(module, inputs)

    def fail(*args: Any) -> Any:
        raise RuntimeError(point)

    options = TransformerOptions()
    options = {
        "attn1": options.with_attn1_patch(fail),
        "attn2": options.with_attn2_patch(fail),
        "attn1_out": options.with_attn1_output_patch(fail),
        "attn2_out": options.with_attn2_output_patch(fail),
        "input": options.with_input_block_patch(fail),
        "input_after": options.with_input_block_patch(fail, after_skip=True),
        "middle": options.with_middle_block_patch(fail),
        "output": options.with_output_block_patch(fail),
    }[point]
    with pytest.raises(RuntimeError, match=point):
        with_options(module, inputs, options)
    assert overlaid(module) == []
    assert torch.equal(run(module, inputs), plain)


def test_a_run_inside_a_run_with_the_same_options_sees_them_once() -> None:
    """Clones share their options: equal, even the same, options are still two runs."""
    module, inputs = unet_sd1()
    calls: list[int] = []

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return executor(*args, **kwargs)

    options = ModelOptions(TransformerOptions().with_middle_block_patch(lambda h, extra: h * 1.5))
    options = options.with_wrapper(WrapperPoint.DIFFUSION_MODEL, count)
    with applied(module, options):
        once = run(module, inputs)
        with applied(module, options):
            assert torch.equal(run(module, inputs), once)
        assert torch.equal(run(module, inputs), once)
    assert len(calls) == 3
    assert overlaid(module) == []


def test_a_run_of_another_model_inside_a_run_leaves_its_options_in_force() -> None:
    """A control model's run inside a UNet's."""
    module, inputs = unet_sd1()
    other, _ = unet_sdxl()
    options = ModelOptions(TransformerOptions().with_middle_block_patch(lambda h, extra: h * 1.5))
    with applied(module, options):
        changed = run(module, inputs)
        with applied(other, ModelOptions()):
            assert torch.equal(run(module, inputs), changed)


def test_a_run_inside_a_run_sees_its_own_options_only() -> None:
    module, inputs = unet_sd1()
    plain = run(module, inputs)
    outer = TransformerOptions().with_middle_block_patch(lambda h, extra: h * 0)
    with applied(module, ModelOptions(outer)):
        changed = run(module, inputs)
        with applied(module, ModelOptions()):
            assert torch.equal(run(module, inputs), plain)
        assert torch.equal(run(module, inputs), changed)
    assert not torch.equal(changed, plain)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (TransformerOptions().with_double_block_patch(dict), "double_block"),
        (TransformerOptions().with_post_input_patch(dict), "post_input"),
        (TransformerOptions().with_block_replace(dict, "double_block", 0), "dit"),
        (TransformerOptions().with_rope_options(RopeOptions(2.0)), "rope_options"),
        (TransformerOptions().with_attn1_replace(dict, "input", 99), "99"),
        (TransformerOptions().with_attn2_replace(dict, "input", 0), "attn2"),
        (TransformerOptions().with_attn2_replace(dict, "input", 2), "attn2"),
        (TransformerOptions().with_attn2_replace(dict, "output", 0), "attn2"),
        (TransformerOptions().with_attn1_replace(dict, "input", 1, 7), "7"),
        (TransformerOptions().with_forward_timestep_embed_patch(nn.LSTM, dict), "LSTM"),
    ],
)
def test_an_option_without_a_place_is_refused_not_ignored(options: TransformerOptions, named: str) -> None:
    module, inputs = unet_sd1()
    with pytest.raises(UnusableField, match=named):
        with_options(module, inputs, options)
    assert overlaid(module) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (TransformerOptions().with_middle_block_patch(dict), "middle_block_patch"),
        (TransformerOptions().with_attn1_patch(dict), "attn1_patch"),
        (TransformerOptions().with_attn2_output_patch(dict), "attn2_output_patch"),
    ],
)
def test_an_option_for_a_part_that_this_unet_lacks_is_refused(options: TransformerOptions, named: str) -> None:
    module = diffusers.UNet2DConditionModel(
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
        cross_attention_dim=32,
    )
    with pytest.raises(UnusableField, match=named), applied(module, ModelOptions(options)):
        pass
    assert overlaid(module) == []
