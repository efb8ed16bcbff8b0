"""Options, hooks and casting together: a small UNet sampled through a patcher, on a device with weights here and there.

Proves: patched runs are equal bit for bit wherever weights are; identity options and hooks change nothing; a patcher's
options reach the sampler; two conditions with options of their own are what each is alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.sampling_stage import sample
from modelpool.pool.inference.sampling.schedules import make_sigmas, sd1_sigma_table
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import (
    Encoded,
    GuidanceParams,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.patcher.hooked_run import hooked_run
from modelpool.pool.weights.patcher.hooks import HookGroup, WeightHook
from modelpool.pool.weights.patcher.keyframes import HookKeyframe, HookKeyframes
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.patched_weight_cache import HookMode
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.inference.sampling.one_image import denoise_image
from tests.pool.input_names import inputs_of
from tests.pool.toy import make_patch
from tests.pool.weights.patcher.blocks.tiny import overlaid, unet_sd1

DEVICE = "sim:0"  # a name until `sim.install` has run
TABLE = sd1_sigma_table()
WORK = SampleParams(
    ModelRef("toy", "toy", "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(4, "euler", "normal"),
    GuidanceParams(3.0),
    11,
)
SIGMAS = make_sigmas(WORK.schedule.noise_schedule, WORK.schedule.steps, TABLE).tolist()
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
LATENT = LatentFacts(4, 8, 0.18215)
COND, UNCOND = (torch.randn(7, 32, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, 1 << 30)


def patcher_of(share: float = 0.0, patches: PatchSet | None = None) -> ModelPatcher:
    """A UNet stored in half precision, with a share of its modules resident."""
    module, _ = unet_sd1()
    for sub in module.modules():
        for name, parameter in sub._parameters.items():
            if parameter is not None:
                sub._parameters[name] = nn.Parameter(parameter.half(), requires_grad=False)
    form = WeightForm(torch.float32)
    patcher = ModelPatcher.of(ComponentKey("unet"), Role.DIFFUSION_MODEL, module, torch.device(DEVICE), form)
    patcher.add_patches((patches or PatchSet()).patches)
    names = sorted(m.name for m in patcher.modules())
    patcher.realize(WeightsTarget(frozenset(names[: int(share * len(names))]), patcher.patches))
    return patcher


def image(patcher: ModelPatcher, groups: tuple[Any, Any] = (None, None), cache_bytes: int = 0) -> Tensor:
    with (
        patcher.running() as module,
        hooked_run(patcher, SIGMAS[0], TABLE.sigma_at_percent, cache_bytes) as apply_hooks,
    ):

        def predict(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
            return module(x_BCHW, timestep_B, context_BLD, return_dict=False)[0]

        return denoise_image(
            predict, WORK, (4, 8, 8), COND, UNCOND, patcher.device, QUIET,
            options=patcher.model_options, apply_hooks=apply_hooks, cond_hooks=groups,
        )  # fmt: skip


def sampled(patcher: ModelPatcher) -> Tensor:
    inputs = inputs_of(WORK, *(Encoded(text.numpy()) for text in (COND, UNCOND)))
    return torch.from_numpy(sample(WORK, inputs, patcher, LATENT, QUIET).samples_CHW)


def freeu_like(h: Tensor, skip: Tensor, extra: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return h * 1.1, skip * 0.9


def doubled_keys(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return q, torch.cat([k, k * 0.5], dim=1), torch.cat([v, v], dim=1)


def lora(strength: float = 1.0) -> PatchSet:
    return PatchSet((make_patch(ATTENTION, (32, 32), "lora", strength * 8.0),))


def test_patched_runs_do_not_depend_on_where_weights_are() -> None:
    options = TransformerOptions().with_output_block_patch(freeu_like).with_attn1_patch(doubled_keys)
    found = []
    for share in (0.0, 0.5, 1.0):
        patcher = patcher_of(share, lora())
        patcher.state = patcher.state.with_options(lambda o: o.with_transformer(lambda _: options))
        found.append(sampled(patcher))
        assert overlaid(patcher.module) == []
        patcher.unload()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], sampled(patcher_of()))


def test_a_patchers_options_reach_the_sampler_of_its_stage() -> None:
    patcher = patcher_of(1.0)
    plain = sampled(patcher)
    seen: list[float] = []

    def post_cfg(args: dict[str, Any]) -> Tensor:
        seen.append(float(args["sigma"][0]))
        return args["denoised"] * 0.5

    patcher.state = patcher.state.with_options(lambda o: o.with_sampler_post_cfg_function(post_cfg))
    assert not torch.allclose(sampled(patcher), plain)
    assert seen == pytest.approx(SIGMAS[:-1])
    patcher.state = patcher.state.with_options(lambda _: ModelOptions())
    assert torch.equal(sampled(patcher), plain)


@pytest.mark.parametrize("mode", list(HookMode))
def test_a_constant_hook_on_both_texts_is_the_lora(mode: HookMode) -> None:
    group = HookGroup((WeightHook(lora().patches),))
    patcher = patcher_of(0.5)
    plain = image(patcher)
    hooked = image(patcher, (group, group), mode.cache_bytes(1 << 20, 1 << 10))
    assert torch.equal(hooked, image(patcher_of(0.5, lora())))
    assert not torch.equal(hooked, plain)
    assert torch.equal(image(patcher), plain)


def test_a_hook_of_one_text_leaves_the_other_alone() -> None:
    """As if the two texts had a model each: the guided guess is a sum of both."""
    fading = HookKeyframes((HookKeyframe(1.0), HookKeyframe(0.0, 0.5, 0)))
    group = HookGroup((WeightHook(lora().patches, keyframes=fading),))
    found = image(patcher_of(1.0), (group, None))
    plain, patched = patcher_of(1.0), patcher_of(1.0, lora())

    def predict(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        parts = []
        early = float(timestep_B[0]) > 500
        for row, model in ((0, plain), (1, patched if early else plain)):
            with model.running() as module:
                part = slice(row, row + 1)
                parts.append(module(x_BCHW[part], timestep_B[part], context_BLD[part], return_dict=False)[0])
        return torch.cat(parts)

    expected = denoise_image(predict, WORK, (4, 8, 8), COND, UNCOND, torch.device(DEVICE), QUIET)
    assert torch.equal(found, expected)


def test_options_of_one_text_act_on_it_alone() -> None:
    seen: list[list[int]] = []

    def note(h: Tensor, extra: dict[str, Any]) -> Tensor:
        seen.append(extra["cond_or_uncond"])
        return h * 0.5

    patcher = patcher_of(1.0)
    plain = image(patcher)
    group = HookGroup().with_transformer_options(TransformerOptions().with_middle_block_patch(note))
    changed = image(patcher, (group, None))
    assert seen == [[0]] * WORK.schedule.steps
    assert not torch.equal(changed, plain)
    assert overlaid(patcher.module) == []
    both = patcher.clone()
    both.state = both.state.with_options(lambda o: o.with_transformer(lambda t: group.transformer))
    seen.clear()
    assert torch.equal(image(patcher, (group, group)), image(both))
    assert torch.equal(image(patcher), plain)


def test_max_speed_leaves_room_for_two_forward_passes_and_min_vram_keeps_nothing() -> None:
    assert HookMode.MAX_SPEED.cache_bytes(1000, 300) == 400
    assert HookMode.MAX_SPEED.cache_bytes(500, 300) == 0
    assert HookMode.MIN_VRAM.cache_bytes(1000, 0) == 0
