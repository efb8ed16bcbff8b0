"""Stages whole and divided, pixels to latents, and stopping inside a stage.

Proves: a division that divides nothing changes no bit; divided runs give nearly the same in less memory; what is
stopped, at a layer, from another thread, ends there, leaves no byte behind and does not stop the next run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.shapes.drawing import Scene, ShapeInScene, draw
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.sampling_stage import sample
from modelpool.pool.engine.stages import TextEncoder, decode, encode, vae_encode
from modelpool.pool.inference.pixels.latent_pixels import as_bytes
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import (
    Encoded,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    Latent,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    Stopped,
)
from modelpool.pool.values.core.stopping import ASK_EVERY_SECONDS
from modelpool.pool.values.specs.spec import ComponentKey, ExecutionMode, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from tests.pool.input_names import inputs_of

SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "models" / "shapes.safetensors"
INDEX = 66  # of a simulated device that no other test uses
MODEL = ModelRef("shapes", str(SHAPES), "00")
WORK = SampleParams(
    MODEL, (), OutputShape(64, 64), SamplingSchedule(2, "euler_ancestral", "normal"), GuidanceParams(4.0), 7
)
LATENT = LatentFacts(4, 8, 0.18215)
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
TOKENIZER = ClipTokenizer.load()


def patcher(role: Role, share: float = 0.5) -> ModelPatcher:
    """A component of the shapes model on a simulated device, with a share of its modules resident."""
    sim.configure(INDEX, 1 << 30)
    module = open_checkpoint(SHAPES).build(role).module
    made = ModelPatcher.of(
        ComponentKey(role.value), role, module, torch.device("sim", INDEX), WeightForm(torch.float32)
    )
    names = sorted(m.name for m in made.modules())
    made.realize(WeightsTarget(frozenset(names[: int(share * len(names))]), made.patches))
    return made


def texts(*tokens: int) -> tuple[Encoded, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(Encoded(torch.randn(length, 32, generator=generator).numpy()) for length in tokens)


def sampled(model: ModelPatcher, division: ExecutionMode | None = None, tokens: tuple[int, ...] = (77, 77)) -> Latent:
    return sample(WORK, inputs_of(WORK, *texts(*tokens)), model, LATENT, QUIET, division)


def scene(side_pixels: int) -> ImagePixels:
    at = side_pixels // 2
    shapes = (ShapeInScene("red", "circle", at, at, 20), ShapeInScene("cyan", "square", at // 3, at // 3, 14))
    return ImagePixels((draw(Scene(shapes), side_pixels) * 255).round().astype(np.uint8))


def peak_of(run: Callable[[], object]) -> int:
    """Bytes that were in use at most, beside what was in use before."""
    before_bytes = sim.memory_stats(INDEX).used_bytes
    sim.reset_peak(INDEX)
    run()
    return sim.memory_stats(INDEX).peak_bytes - before_bytes


def mean_levels(found: ImagePixels, expected: ImagePixels) -> float:
    return float(np.abs(found.pixels_HWC.astype(int) - expected.pixels_HWC.astype(int)).mean())


@pytest.fixture(scope="module")
def scene_latent() -> Latent:
    """Of 192x192 pixels: 24x24 cells."""
    return vae_encode(scene(192), patcher(Role.VAE, 1.0), LATENT, QUIET)


def test_a_division_that_divides_nothing_changes_no_bit(scene_latent: Latent) -> None:
    model, vae = patcher(Role.DIFFUSION_MODEL), patcher(Role.VAE)
    plain = sampled(model).samples_CHW
    for batch in (0, 2):
        assert np.array_equal(sampled(model, ExecutionMode(0, batch=batch)).samples_CHW, plain)
    whole = decode(scene_latent, vae, LATENT, QUIET)
    for tile in (0, 24, 100):
        division = ExecutionMode(0, tile=tile)
        assert np.array_equal(decode(scene_latent, vae, LATENT, QUIET, division).pixels_HWC, whole.pixels_HWC)
        again = vae_encode(scene(192), vae, LATENT, QUIET, division=division)
        assert np.array_equal(again.samples_CHW, scene_latent.samples_CHW)


def test_pixels_leave_the_device_as_bytes(scene_latent: Latent) -> None:
    """Found in a review: float32 pixels crossed the bus, and the CPU made bytes of them in six passes."""
    vae = patcher(Role.VAE, 1.0)
    before_bytes = sim.memory_stats(INDEX).d2h_bytes
    image = decode(scene_latent, vae, LATENT, QUIET)
    assert sim.memory_stats(INDEX).d2h_bytes - before_bytes == image.pixels_HWC.nbytes + 1, (
        "and one that says whether all are numbers"
    )
    assert image.pixels_HWC.nbytes == 192 * 192 * 3


def test_bytes_of_a_video_are_made_without_another_copy_of_it_in_float32() -> None:
    """Found in a review: two copies in float32, which no estimate counts, were on the device besides the pixels."""
    pixels_BCTHW = torch.linspace(-1.2, 1.2, 3 * 22 * 64 * 64).view(1, 3, 22, 64, 64).to(torch.bfloat16)
    expected = pixels_BCTHW.float().add(1).mul(127.5).clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
    there = pixels_BCTHW.to(patcher(Role.VAE, 1.0).device)
    assert peak_of(lambda: as_bytes(there)) < 1.5 * there.nbytes
    assert torch.equal(as_bytes(there).cpu(), expected)
    assert torch.equal(as_bytes(there[:, :, 5]).cpu(), expected[:, 5])


def test_texts_one_at_a_time_give_the_same_latent_in_less_memory() -> None:
    model = patcher(Role.DIFFUSION_MODEL, 1.0)
    batches: list[int] = []
    handle = model.module.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    together = sampled(model).samples_CHW
    apart = sampled(model, ExecutionMode(0, batch=1)).samples_CHW
    handle.remove()
    # one text takes five times the other's length, both together fifteen times the shorter one's: each its own
    uneven = sampled(model, ExecutionMode(0, batch=1), (3 * 77, 5 * 77)).samples_CHW
    assert batches == [2] * WORK.schedule.steps + [1] * 2 * WORK.schedule.steps
    np.testing.assert_allclose(apart, together, rtol=1e-4, atol=1e-4)
    assert uneven.shape == together.shape
    divided_bytes = peak_of(lambda: sampled(model, ExecutionMode(0, batch=1)))
    assert divided_bytes < 0.7 * peak_of(lambda: sampled(model))


def test_texts_of_very_different_length_run_apart_by_themselves() -> None:
    """Not at the least common multiple of 5 and 6 chunks, which would be 30."""
    model = patcher(Role.DIFFUSION_MODEL, 1.0)
    seen: list[tuple[int, ...]] = []
    handle = model.module.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[2].shape[:2])))
    sampled(model, tokens=(5 * 77, 6 * 77))
    handle.remove()
    assert seen == [(1, 6 * 77), (1, 5 * 77)] * WORK.schedule.steps


def test_decoding_by_tiles_gives_nearly_the_same_image_in_less_memory(scene_latent: Latent) -> None:
    vae = patcher(Role.VAE, 1.0)
    told: list[tuple[int, int]] = []
    hooks = RunHooks(on_step=lambda done, steps: told.append((done, steps)), should_stop=lambda: False)
    whole = decode(scene_latent, vae, LATENT, QUIET)
    tiled = decode(scene_latent, vae, LATENT, hooks, ExecutionMode(0, tile=16))
    assert told == [(tile, 4) for tile in range(1, 5)]
    # measured: 0.8 levels of 255; norms see one tile
    assert 0 < mean_levels(tiled, whole) < 2.0
    tiled_bytes = peak_of(lambda: decode(scene_latent, vae, LATENT, QUIET, ExecutionMode(0, tile=16)))
    whole_bytes = peak_of(lambda: decode(scene_latent, vae, LATENT, QUIET))
    # 14 of 24 cells along each side
    assert tiled_bytes < 1.05 * (14 / 24) ** 2 * whole_bytes


def test_divided_runs_do_not_depend_on_where_weights_are(scene_latent: Latent) -> None:
    images = [
        decode(scene_latent, patcher(Role.VAE, share), LATENT, QUIET, ExecutionMode(0, tile=12)).pixels_HWC
        for share in (0.0, 0.5, 1.0)
    ]
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images[0], images[2])


def test_pixels_become_a_latent_that_decodes_to_them() -> None:
    vae = patcher(Role.VAE)
    alone = Scene((ShapeInScene("red", "circle", 32, 32, 20),))
    image = ImagePixels((draw(alone, 64) * 255).round().astype(np.uint8))
    latent = vae_encode(image, vae, LATENT, QUIET)
    assert latent.samples_CHW.shape == (4, 8, 8)
    assert latent.samples_CHW.dtype == np.float32
    assert mean_levels(decode(latent, vae, LATENT, QUIET), image) < 4.0


def test_a_sampled_latent_is_a_function_of_its_seed() -> None:
    vae = patcher(Role.VAE)
    mean, one, again, two = (vae_encode(scene(64), vae, LATENT, QUIET, seed) for seed in (None, 1, 1, 2))
    assert np.array_equal(one.samples_CHW, again.samples_CHW)
    assert not np.array_equal(one.samples_CHW, two.samples_CHW)
    assert not np.array_equal(one.samples_CHW, mean.samples_CHW)


def test_scale_and_shift_go_out_as_they_came_in() -> None:
    vae = patcher(Role.VAE)
    shifted = LatentFacts(4, 8, 0.5, shift=0.25)
    plain = vae_encode(scene(64), vae, LatentFacts(4, 8, 1.0), QUIET)
    latent = vae_encode(scene(64), vae, shifted, QUIET)
    np.testing.assert_allclose(latent.samples_CHW, (plain.samples_CHW - 0.25) * 0.5, rtol=1e-6, atol=1e-6)
    expected = decode(plain, vae, LatentFacts(4, 8, 1.0), QUIET)
    assert mean_levels(decode(latent, vae, shifted, QUIET), expected) < 0.01


def test_means_and_deviations_go_out_as_they_came_in() -> None:
    vae = patcher(Role.VAE)
    means, deviations = (0.25, -0.5, 1.0, 0.0), (2.0, 0.5, 1.0, 4.0)
    measured = LatentFacts(4, 8, 0.5, means=means, deviations=deviations)
    plain = vae_encode(scene(64), vae, LatentFacts(4, 8, 1.0), QUIET)
    latent = vae_encode(scene(64), vae, measured, QUIET)
    by_channel = [np.reshape(values, (4, 1, 1)) for values in (means, deviations)]
    expected = (plain.samples_CHW - by_channel[0]) / by_channel[1] * 0.5
    np.testing.assert_allclose(latent.samples_CHW, expected, rtol=1e-6, atol=1e-6)
    image = decode(plain, vae, LatentFacts(4, 8, 1.0), QUIET)
    assert mean_levels(decode(latent, vae, measured, QUIET), image) < 0.01


def test_a_image_that_is_no_whole_number_of_cells_is_refused() -> None:
    with pytest.raises(UnusableField, match=r"size of the pixels.*\(68, 64\).*multiples of 8"):
        vae_encode(ImagePixels(np.zeros((68, 64, 3), np.uint8)), patcher(Role.VAE), LATENT, QUIET)


class NoLayers(torch.nn.Module):
    """A VAE without a layer at which a run could be asked to stop."""

    def decode(self, z_BCHW: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        return (z_BCHW[:, :3].repeat_interleave(8, 2).repeat_interleave(8, 3),)

    def encode(self, x_BCHW: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        moments_BCHW = torch.nn.functional.avg_pool2d(x_BCHW[:, :1], 8).repeat(1, 8, 1, 1)
        return (moments_BCHW,)


@pytest.mark.parametrize("name", ["decode", "vae_encode"])
def test_a_vae_without_layers_stops_between_tiles(name: str, scene_latent: Latent) -> None:
    """Found in a review: with the check before each tile left out, no test failed, as layers ask too."""
    sim.configure(INDEX, 1 << 30)
    form = WeightForm(torch.float32)
    vae = ModelPatcher.of(ComponentKey("plain"), Role.VAE, NoLayers(), torch.device("sim", INDEX), form)
    done: list[int] = []

    def run(hooks: RunHooks) -> object:
        if name == "decode":
            return decode(scene_latent, vae, LATENT, hooks, ExecutionMode(0, tile=16))
        return vae_encode(scene(192), vae, LATENT, hooks, division=ExecutionMode(0, tile=16))

    with pytest.raises(Stopped):
        run(RunHooks(on_step=lambda tile, tiles: done.append(tile), should_stop=lambda: len(done) == 2))
    assert done == [1, 2]
    run(QUIET)


Stage = Callable[[RunHooks], np.ndarray]


def stage(name: str) -> tuple[ModelPatcher, Stage]:
    match name:
        case "encode":
            text = patcher(Role.TEXT_ENCODER)
            return (
                text,
                lambda hooks: (
                    encode(EncodeParams(MODEL, (), "a red circle"), [TextEncoder(text)], TOKENIZER, hooks).context_LD
                ),
            )
        case "sample":
            model = patcher(Role.DIFFUSION_MODEL)
            return model, lambda hooks: sample(WORK, inputs_of(WORK, *texts(77, 77)), model, LATENT, hooks).samples_CHW
        case "decode":
            vae = patcher(Role.VAE)
            latent = Latent(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)).numpy())
            return vae, lambda hooks: decode(latent, vae, LATENT, hooks).pixels_HWC
        case _:
            vae = patcher(Role.VAE)
            return vae, lambda hooks: vae_encode(scene(64), vae, LATENT, hooks).samples_CHW


@pytest.mark.parametrize("name", ["encode", "sample", "decode", "vae_encode"])
def test_every_stage_stops_at_a_layer_when_another_thread_asks(name: str) -> None:
    made, run = stage(name)
    expected = run(QUIET)
    layers = [module for module in made.module.modules() if isinstance(module, torch.nn.Linear)]
    used_bytes = sim.memory_stats(INDEX).used_bytes
    under_way, asked, steps = threading.Event(), threading.Event(), []

    def ask() -> None:
        under_way.wait()
        asked.set()

    def at_layer(module: torch.nn.Module, args: object) -> None:
        under_way.set()
        if not asked.is_set():
            asked.wait()
            time.sleep(2 * ASK_EVERY_SECONDS)

    handles = [layer.register_forward_pre_hook(at_layer) for layer in layers]
    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(Stopped):
        run(RunHooks(on_step=lambda done, of: steps.append(done), should_stop=asked.is_set))
    thread.join()
    for handle in handles:
        handle.remove()
    assert steps == []
    assert sim.memory_stats(INDEX).used_bytes == used_bytes
    assert np.array_equal(run(QUIET), expected)


def test_a_tiled_run_stops_between_tiles(scene_latent: Latent) -> None:
    vae = patcher(Role.VAE, 1.0)
    done: list[int] = []
    hooks = RunHooks(on_step=lambda tile, tiles: done.append(tile), should_stop=lambda: len(done) == 2)
    with pytest.raises(Stopped):
        decode(scene_latent, vae, LATENT, hooks, ExecutionMode(0, tile=16))
    assert done == [1, 2]
