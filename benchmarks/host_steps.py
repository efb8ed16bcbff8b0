"""Measures what a sampling step costs the host: the pool beside the loop of diffusers' pipeline and the bare module.

    python -m benchmarks.host_steps [--repeats 5] [--steps 24] [--profile flux|wan|sdxl]

The diffusion models have as many layers as SDXL, Flux and Wan 1.3B and narrow ones, so that a step takes next to no
compute: what is left is launched kernel by kernel on a GPU, too. CPU time of the process with one thread, which other
load on the machine changes little; the three take turns, and each figure is the least of the repeats. A step is the
difference of a run with `--steps` and one with 4 steps, divided by the steps between: what is done once is left out.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.stage_params import Encoded, SampleParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_transformers import FAMILIES, WIDTH
from tests.pool.families.whole_transformer import Whole
from tests.pool.input_names import results_read
from tests.pool.models.loading import layouts
from tests.pool.pipeline import QUIET

LEAST_STEPS, SIDES = 4, (64, 64)


@dataclass
class Shape:
    """One model: functions that sample so many steps, and its module as diffusers has it with the inputs of a call."""

    pool: Callable[[int], object]
    pipeline: Callable[[int], object]
    bare: Any
    calls_per_step: int
    call: tuple[tuple[Any, ...], dict[str, Any]]


def main() -> None:
    """Measure and print the table, or profile the pool's runs of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--profile")
    given = parser.parse_args()
    torch.set_num_threads(1)
    makers = {"sdxl": _sdxl, "flux": _flux, "wan": _wan}
    if given.profile:
        with tempfile.TemporaryDirectory() as folder:
            _profile(makers[given.profile](Path(folder)), given.steps)
        return
    print(
        "| shape | bare module ms | diffusers' loop ms | pool ms | pool to bare | pool to diffusers | pool, per run |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, make in makers.items():
        with tempfile.TemporaryDirectory() as folder:
            print(_row(name, make(Path(folder)), given.steps, given.repeats), flush=True)


def _row(name: str, shape: Shape, steps: int, repeats: int) -> str:
    found: dict[str, list[float]] = {key: [] for key in ("bare", "pipeline", "pool", "run")}
    args, kwargs = shape.call
    for turn in range(repeats + 1):
        with torch.no_grad():
            began = time.process_time()
            for _ in range(steps - LEAST_STEPS):
                for _ in range(shape.calls_per_step):
                    shape.bare(*args, **kwargs)
            bare = (time.process_time() - began) / (steps - LEAST_STEPS)
        pipeline, _ = _per_step(shape.pipeline, steps)
        pool, run = _per_step(shape.pool, steps)
        if turn:  # the first one is for warming up
            for key, value in zip(found, (bare, pipeline, pool, run), strict=True):
                found[key].append(value)
    bare, pipeline, pool, run = (1e3 * min(values) for values in found.values())
    ratios = f"{pool / bare:.3f} | {pool / pipeline:.3f}"
    return f"| {name} | {bare:.2f} | {pipeline:.2f} | {pool:.2f} | {ratios} | {run:.1f} ms |"


def _per_step(sample: Callable[[int], object], steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and those of a run apart from its steps."""
    began = time.process_time()
    sample(LEAST_STEPS)
    middle = time.process_time()
    sample(steps)
    few, many = middle - began, time.process_time() - middle
    step = (many - few) / (steps - LEAST_STEPS)
    return step, few - LEAST_STEPS * step


def _profile(shape: Shape, steps: int) -> None:
    shape.pool(LEAST_STEPS)
    profile = cProfile.Profile()
    profile.enable()
    shape.pool(steps)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def _captured(module: Any, run: Callable[[], object]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs of all calls of `module` in a run."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = module.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True
    )
    run()
    hook.remove()
    return calls


def _shape(pool: Callable[[int], object], pipeline: Callable[[int], object], bare: Any) -> Shape:
    calls = _captured(bare, lambda: pipeline(LEAST_STEPS))
    return Shape(pool, pipeline, bare, len(calls) // LEAST_STEPS, calls[-1])


def _told(text: Encoded) -> dict[str, Any]:
    found = {"prompt_embeds": torch.from_numpy(text.context_LD.copy())[None]}
    if text.pooled_V is not None:
        found["pooled_prompt_embeds"] = torch.from_numpy(text.pooled_V.copy())[None]
    return found


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _bare(whole: Whole | TinyModel) -> Any:
    """The diffusion model as diffusers has it: opened apart, so that no patcher has it."""
    return copy.deepcopy(whole.module(Role.DIFFUSION_MODEL))


def _flux(folder: Path) -> Shape:
    def model() -> Any:
        return diffusers.FluxTransformer2DModel(
            in_channels=64, num_layers=19, num_single_layers=38, num_attention_heads=2, attention_head_dim=32,
            joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 14, 14), guidance_embeds=True,
        )  # fmt: skip

    whole = Whole(folder, replace(FAMILIES["flux_dev"], model=model, sides=SIDES))
    bare, texts = _bare(whole), whole.texts()
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
    made = _quiet(diffusers.FluxPipeline(scheduler, whole.module(Role.VAE), None, None, None, None, bare))
    noise = ImageNoise(1).draw((1, *latent_shape(*SIDES, 0, whole.opened.latent)))
    packed = made._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:])

    def pipeline(steps: int) -> object:
        return made(
            **_told(texts[0]), height=SIDES[1], width=SIDES[0], num_inference_steps=steps, guidance_scale=3.5,
            latents=packed, output_type="latent",
        )  # fmt: skip

    return _shape(lambda steps: whole.latent(texts, steps=steps), pipeline, bare)


def _wan(folder: Path) -> Shape:
    def model() -> Any:
        return diffusers.WanTransformer3DModel(
            num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=WIDTH,
            freq_dim=16, ffn_dim=32, num_layers=30, rope_max_seq_len=1024,
        )  # fmt: skip

    whole = Whole(folder, replace(FAMILIES["wan_t2v"], model=model, sides=SIDES))
    bare, texts = _bare(whole), whole.texts()
    made = _quiet(
        diffusers.WanPipeline(None, None, whole.module(Role.VAE), FlowMatchEulerDiscreteScheduler(shift=8.0), bare)
    )
    noise = ImageNoise(1).draw((1, *latent_shape(*SIDES, whole.frames, whole.opened.latent)))
    (positive, negative), frames = map(_told, texts), whole.frames

    def pipeline(steps: int) -> object:
        return made(
            **positive, negative_prompt_embeds=negative["prompt_embeds"], height=SIDES[1], width=SIDES[0],
            num_inference_steps=steps, num_frames=frames, latents=noise, guidance_scale=5.0, output_type="latent",
        )  # fmt: skip

    return _shape(lambda steps: whole.latent(texts, steps=steps), pipeline, bare)


def _sdxl(folder: Path) -> Shape:
    unet = replace(layouts.TINY_SDXL_UNET, multipliers=(1, 2, 4), res_blocks=2, depths=(0, 2, 10), middle_depth=10)
    layout = {
        key: value for key, value in layouts.tiny_sdxl().items() if not key.startswith("model.diffusion_model.")
    } | layouts.ldm_unet(unet)
    tiny = TinyModel(folder, layout)
    bare = _bare(tiny)
    size = {"width": SIDES[0], "height": SIDES[1]}
    texts = tiny.made(steps=1, **size).texts
    vae = tiny.module(Role.VAE)
    made = _quiet(diffusers.StableDiffusionXLPipeline(vae, None, None, None, None, bare, EulerDiscreteScheduler()))

    def pipeline(steps: int) -> object:
        return made(**texts, **size, num_inference_steps=steps, guidance_scale=5.0, output_type="latent")

    def pool_run(steps: int) -> Callable[[], object]:
        known = tiny.made(steps=steps, **size)
        task = next(task for task in known.tasks if isinstance(known.works[task.task_id], SampleParams))
        inputs = results_read(task, known.results)
        return lambda: tiny.engine.run(task, known.works[task.task_id], inputs, QUIET)

    runs: dict[int, Callable[[], object]] = {}

    def pool(steps: int) -> object:
        if steps not in runs:
            runs[steps] = pool_run(steps)
        return runs[steps]()

    return _shape(pool, pipeline, bare)


if __name__ == "__main__":
    main()
