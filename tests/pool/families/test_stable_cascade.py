"""Stable Cascade, whole: a request of stage C finds stage B, and the image is the image of diffusers' pair of pipelines
with the same weights, texts and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_cascade import (
    pipeline_stable_cascade,
    pipeline_stable_cascade_prior,
)
from diffusers.schedulers import scheduling_ddpm_wuerstchen
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.estimates.typical_run import typical_params
from modelpool.pool.catalog.registry.assembling import SelectedFiles, assemble
from modelpool.pool.catalog.registry.registry import open_registry
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.engine.explicit_control import load_checkpoint
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.families.unet_families import CASCADES
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture, UnusableField
from modelpool.pool.values.core.stage_params import BatchMember, ImagePixels, Latent, PriorCondition, SampleParams
from modelpool.pool.values.specs.spec import Role, Stage
from tests.pool.families.tiny_cascade import (
    PRIOR,
    STAGE_B,
    STAGE_C,
    Pair,
    Ran,
    stage_b_file,
    stage_c_file,
    text_encoder,
    write_files,
    write_folders,
)
from tests.pool.input_names import results_read
from tests.pool.models.components.text.pipelines import clip_tokenizer
from tests.pool.pipeline import QUIET

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In sim autocast:UserWarning"),
]
SEED, STEPS, SECOND_STEPS, CFG = 11, 3, 2, 4.0
PROMPT, NEGATIVE, WIDTH, HEIGHT = "a small red cat on the moon", "a dog", 256, 128
REQUEST: dict[str, Any] = {
    "model": STAGE_C, "prompt": PROMPT, "negative": NEGATIVE, "seed": SEED, "width": WIDTH, "height": HEIGHT,
    "steps": STEPS, "cfg": CFG,
}  # fmt: skip
END = "<|endoftext|>"
#: what rounds otherwise once, and is carried on
CLOSE = 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both files in one folder, on the CPU."""
    folder = tmp_path_factory.mktemp("cascade")
    write_files(folder)
    opened = Pair(folder)
    yield opened
    opened.engine.close()


class _Noises:
    """What is drawn in the place of `randn_tensor`: for stage C's latents the numbers of one seed, for stage B's those
    of another, each in order."""

    def __init__(self, seed: int) -> None:
        self._prior, self._second = ImageNoise(seed), ImageNoise(2**64 - 1 - seed)

    def __call__(self, shape: Any, **_: Any) -> Tensor:
        return (self._prior if shape[1] == PRIOR else self._second).draw(shape)


def _combined(pair: Pair, second_cfg: float) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """Both latents, and the image from 0 to 1."""
    text_encoder = pair.module(STAGE_C, Role.TEXT_ENCODER)
    decoder, vqgan = pair.module(STAGE_B, Role.DIFFUSION_MODEL), pair.module(STAGE_B, Role.VAE)
    prior = pair.module(STAGE_C, Role.DIFFUSION_MODEL)
    vqgan.register_to_config(scale_factor=0.43)
    tokenizer = clip_tokenizer(END)
    pipeline = diffusers.StableCascadeCombinedPipeline(
        tokenizer, text_encoder, decoder, diffusers.DDPMWuerstchenScheduler(), vqgan, prior, text_encoder, tokenizer,
        diffusers.DDPMWuerstchenScheduler(),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    modules = (pipeline_stable_cascade, pipeline_stable_cascade_prior, scheduling_ddpm_wuerstchen)
    latents: list[Tensor] = []

    def keep(_pipe: object, _step: int, _time: object, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        latents.append(given["latents"])
        return {}

    noises = _Noises(SEED)
    patches = [mock.patch.object(module, "randn_tensor", noises) for module in modules]
    with torch.no_grad():
        for patch in patches:
            patch.start()
        try:
            made = pipeline(
                prompt=PROMPT, negative_prompt=NEGATIVE, width=WIDTH, height=HEIGHT, prior_num_inference_steps=STEPS,
                prior_guidance_scale=CFG, num_inference_steps=SECOND_STEPS, decoder_guidance_scale=second_cfg,
                output_type="np", prior_callback_on_step_end=keep, callback_on_step_end=keep,
            ).images  # fmt: skip
        finally:
            for patch in patches:
                patch.stop()
    assert len(latents) == STEPS + SECOND_STEPS
    return latents[STEPS - 1], latents[-1], made[0]


#: how strongly stage B follows the text
CASES: Mapping[str, Callable[[Pair], Any]] = {
    "cascade_c": lambda pair: _combined(pair, 0.0),
    "cascade_b": lambda pair: _combined(pair, 1.1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_image_is_that_of_diffusers(name: str, pair: Pair) -> None:
    """StableCascadeCombinedPipeline: without guidance of stage B, as it runs where nobody says otherwise, and with."""
    decoder = {"steps": SECOND_STEPS, **({"cfg": 1.1} if name == "cascade_b" else {})}
    ran = pair.run(**REQUEST, decoder=decoder)
    prior, latent, image = CASES[name](pair)
    (_, ours_first), (_, ours_second) = ran.sampled()
    for ours, theirs in ((ours_first, prior), (ours_second, latent)):
        np.testing.assert_allclose(ours.samples_CHW, theirs[0], atol=CLOSE * max(1.0, float(theirs.std())))
    assert isinstance(ran.made, ImagePixels)
    assert ran.made.pixels_HWC.shape == image.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(ran.made.pixels_HWC / 255 - image).max() <= 1 / 255
    assert ((image > 0) & (image < 1)).mean() > 0.5


def test_both_stages_are_tasks_of_their_own(pair: Pair) -> None:
    """Each names the components that it needs and no others, so that a pool may keep the two on two GPUs; the text is
    read once, and stage B begins with numbers of its own."""
    ran = pair.run(**REQUEST)
    tasks = {task.task_id: task for task in ran.cut.job.tasks}
    kinds = [(task.stage, [use.component.partition("@")[0] for use in task.uses]) for task in tasks.values()]
    assert kinds == [
        (Stage.ENCODE, [f"{STAGE_C}/text_encoder"]), (Stage.ENCODE, [f"{STAGE_C}/text_encoder"]),
        (Stage.SAMPLE, [f"{STAGE_C}/diffusion_model"]), (Stage.SAMPLE, [f"{STAGE_B}/diffusion_model"]),
        (Stage.DECODE, [f"{STAGE_B}/vae"]),
    ]  # fmt: skip
    prompt, negative, first, second, last = tasks.values()
    assert first.needs == (prompt.task_id, negative.task_id)
    assert second.needs == (prompt.task_id, first.task_id)
    assert last.needs == (second.task_id,)
    (c, prior), (b, latent) = ran.sampled()
    assert (c.schedule.steps, c.guidance.cfg, b.schedule.steps, b.guidance.cfg) == (STEPS, CFG, 10, 1.0)
    assert b.prior == PriorCondition(3, 6)
    assert prior.samples_CHW.shape == (16, 3, 6)
    assert latent.samples_CHW.shape == (4, 32, 64)
    assert {c.seed, b.seed} == {SEED, 2**64 - 1 - SEED}
    again = pair.run(**REQUEST)
    np.testing.assert_array_equal(again.made.pixels_HWC, ran.made.pixels_HWC)  # type: ignore[union-attr]
    assert pair.run(**{**REQUEST, "seed": 12}).cut.job.wanted != ran.cut.job.wanted


@pytest.mark.parametrize("make", [stage_c_file, stage_b_file])
def test_a_file_saved_again_is_that_file(make: Callable[[], dict[str, Tensor]], tmp_path: Path) -> None:
    """Tensor for tensor, with what nothing here runs."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_file(make(), first)
    save_checkpoint(open_checkpoint(first), second)
    before, after = load_file(first), load_file(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)


#: layers of stage C that a LoRA is for, rows and columns of each: names that trainers of Stable Cascade write
LORAS = {
    "cascade_c": {
        "down_blocks_0_1_mapper": (128, 64),
        "clip_txt_mapper": (32, 32),
        "down_blocks_1_2_attention_attn_to_v": (128, 128),
        "down_blocks_0_2_attention_to_q": (64, 64),
    },
}
#: and as diffusers and PEFT write them
_OF_DIFFUSERS = {
    "down_blocks.0.1.mapper": (128, 64),
    "clip_txt_mapper": (32, 32),
    "down_blocks.1.2.attention.to_v": (128, 128),
    "down_blocks.0.2.attention.to_q": (64, 64),
}
_FORMS = {
    "kohya": ("lora_prior_unet_{}.lora_up.weight", "lora_prior_unet_{}.lora_down.weight", LORAS["cascade_c"]),
    "diffusers": ("prior.{}.lora_B.weight", "prior.{}.lora_A.weight", _OF_DIFFUSERS),
}


@pytest.mark.parametrize("form", _FORMS)
def test_a_lora_on_stage_c_draws_what_the_merged_file_draws(form: str, tmp_path: Path) -> None:
    """Stage B has no part in it."""
    up, down, layers = _FORMS[form]
    plain, loras, merged = (tmp_path / name for name in ("plain", "loras", "merged"))
    for folder in (plain, loras, merged):
        folder.mkdir()
    write_files(plain)
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for base, (rows, columns) in layers.items():
        tensors[up.format(base)] = torch.randn(rows, 2, generator=generator) * 0.05
        tensors[down.format(base)] = torch.randn(2, columns, generator=generator)
    save_file(tensors, loras / "some.safetensors")
    pair = Pair(plain, loras=(loras,))
    without = pair.run(**REQUEST)
    drawn = pair.run(**REQUEST, loras=("some:0.8",))
    assert not drawn.cut.warnings
    opened = pair.engine._opened(pair.catalog.find_model(STAGE_C))
    save_checkpoint(opened, merged / f"{STAGE_C}.safetensors", loras=(pair.catalog.find_lora("some", 0.8),))
    pair.engine.close()
    save_file(stage_b_file(), merged / f"{STAGE_B}.safetensors")
    other = Pair(merged)
    expected = other.run(**REQUEST)
    for place in range(2):
        before, ours, theirs = (ran.sampled()[place][1].samples_CHW for ran in (without, drawn, expected))
        assert not np.allclose(before, theirs, atol=1e-3)
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * max(1.0, float(np.abs(theirs).max())))
    assert [len(task.uses[0].adapters) for task in drawn.cut.job.tasks] == [0, 0, 1, 0, 0]
    other.engine.close()


def test_streamed_weights_on_the_simulated_device_make_what_resident_ones_make(tmp_path: Path) -> None:
    write_files(tmp_path)
    made = []
    for policy in (VramPolicy.NORMAL, VramPolicy.NONE):
        pair = Pair(tmp_path, EngineSettings("sim", budget_bytes=512 << 20, vram_policy=policy))
        ran = pair.run(**REQUEST, decoder={"steps": SECOND_STEPS, "cfg": 1.1})
        made.append(ran)
        pair.engine.close()
    resident, streamed = made
    for (_, ours), (_, other) in zip(streamed.sampled(), resident.sampled(), strict=True):
        largest = max(1.0, float(np.abs(other.samples_CHW).max()))
        np.testing.assert_allclose(ours.samples_CHW, other.samples_CHW, atol=1e-5 * largest)
    assert isinstance(streamed.made, ImagePixels)
    assert isinstance(resident.made, ImagePixels)
    assert np.abs(streamed.made.pixels_HWC.astype(int) - resident.made.pixels_HWC).max() <= 1


def test_folders_of_diffusers_draw_what_the_files_draw(tmp_path: Path) -> None:
    """The prior's folder finds the decoder's beside it."""
    made: list[Ran] = []
    for name, write, model in (("files", write_files, STAGE_C), ("folders", write_folders, "stable-cascade-prior")):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        pair = Pair(tmp_path / name)
        made.append(pair.run(**{**REQUEST, "model": model}, decoder={"steps": SECOND_STEPS}))
        pair.engine.close()
    for (_, ours), (_, other) in zip(made[0].sampled(), made[1].sampled(), strict=True):
        largest = max(1.0, float(np.abs(other.samples_CHW).max()))
        np.testing.assert_allclose(ours.samples_CHW, other.samples_CHW, atol=1e-5 * largest)
    assert np.abs(made[0].made.pixels_HWC.astype(int) - made[1].made.pixels_HWC).max() <= 1  # type: ignore[union-attr]


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    save_file(stage_c_file(), tmp_path / f"{STAGE_C}.safetensors")
    pair = Pair(tmp_path)
    with pytest.raises(MissingParts, match=r"put its file \(stable_cascade_stage_b\.safetensors\) or its folder"):
        pair.run(**REQUEST)
    with pytest.raises(UnusableField, match=f"decoder: found '{STAGE_C}', expected a model of Stable Cascade B"):
        pair.run(**REQUEST, decoder=STAGE_C)
    pair.engine.close()


def test_stage_b_is_found_beside_stage_c_or_alone_or_named(tmp_path: Path) -> None:
    """Where several could be meant, a person says which."""
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    save_file(stage_c_file(), near / "c.safetensors")
    save_file(stage_b_file(), far / "one.safetensors")

    def decoder(name: str = "") -> str:
        catalog = Catalog((near, far), (), "cpu")
        return catalog.find_decoder(catalog.find_model("c"), name).name

    assert decoder() == "one"
    other = {key: value + 1 if key.endswith("clf.1.bias") else value for key, value in stage_b_file().items()}
    save_file(other, far / "two.safetensors")
    with pytest.raises(UnusableField, match="decoder: missing, expected one of 'one', 'two'"):
        decoder()
    assert decoder("two") == "two"
    third = {key: value + 2 if key.endswith("clf.1.bias") else value for key, value in stage_b_file().items()}
    save_file(third, near / "three.safetensors")
    assert decoder() == "three"


def test_sizes_are_whole_cells_of_both_stages(pair: Pair) -> None:
    with pytest.raises(UnusableField, match=r"width: found 200, expected a multiple of 128.*128 or 256"):
        pair.run(**{**REQUEST, "width": 200})


def test_a_stage_b_of_another_stage_c_is_refused(tmp_path: Path) -> None:
    save_file(stage_b_file(reads=8), tmp_path / "odd.safetensors")
    with pytest.raises(UnknownArchitecture, match="reads latents of 8 channels, expected the 16 of stage C"):
        open_checkpoint(tmp_path / "odd.safetensors")


def test_stage_b_of_several_images_in_one_run_makes_what_it_makes_of_each(pair: Pair) -> None:
    """Each reads what stage C made for it."""
    rans = [pair.run(**{**REQUEST, "seed": seed}, decoder={"steps": 2, "cfg": 1.5}) for seed in (1, 2)]
    tasks = [ran.cut.job.tasks[-2] for ran in rans]
    assert tasks[0].together == tasks[1].together
    members = [
        BatchMember(task, ran.cut.works[task.task_id], results_read(task, ran.results), QUIET)
        for task, ran in zip(tasks, rans, strict=True)
    ]
    outcomes = pair.engine.run_batch(members)
    for outcome, ran, task in zip(outcomes, rans, tasks, strict=True):
        assert isinstance(outcome, tuple)
        (together, _), alone = outcome, ran.results[task.task_id]
        assert isinstance(together, Latent)
        assert isinstance(alone, Latent)
        largest = float(np.abs(alone.samples_CHW).max())
        np.testing.assert_allclose(together.samples_CHW, alone.samples_CHW, atol=1e-5 * largest)


@pytest.mark.parametrize("name", [STAGE_C, STAGE_B])
def test_one_stage_alone_is_not_moved_by_hand(name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    with pytest.raises(
        UnusableField, match=r"path: found .*, expected a model with a text encoder and a VAE of its own"
    ):
        load_checkpoint(tmp_path / f"{name}.safetensors", device="sim")


def test_files_of_one_component_each_are_put_together(tmp_path: Path) -> None:
    """As in the folder of stabilityai/stable-cascade: each model, the VAE and the text encoder in a file of its own."""
    apart = {
        "stage_c": _under("model.diffusion_model.", stage_c_file()),
        "stage_b": _under("model.diffusion_model.", stage_b_file()),
        "stage_a": _under("vae.", stage_b_file()),
        "clip_g": dict(text_encoder().state_dict()),
    }
    for name, tensors in apart.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    registry = open_registry((tmp_path,), (), tmp_path / "registry")
    assemble(registry, "c", SelectedFiles(diffusion_model="stage_c", text_encoders=("clip_g",)), tmp_path)
    assemble(registry, "b", SelectedFiles(diffusion_model="stage_b", vae="stage_a"), tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    write_files(whole)
    made = []
    for folder, model, decoder in ((tmp_path, "c", "b"), (whole, STAGE_C, STAGE_B)):
        pair = Pair(folder)
        made.append(pair.run(**{**REQUEST, "model": model}, decoder={"model": decoder, "steps": 2}).made)
        pair.engine.close()
    np.testing.assert_array_equal(made[0].pixels_HWC, made[1].pixels_HWC)
    with pytest.raises(MissingParts, match="the text encoder clip_g is missing"):
        assemble(registry, "x", SelectedFiles(diffusion_model="stage_c"), tmp_path)
    with pytest.raises(MissingParts, match=r"stage_a.* is its VAE, which is not used: Stable Cascade C has none"):
        assemble(
            registry, "x", SelectedFiles(diffusion_model="stage_c", vae="stage_a", text_encoders=("clip_g",)), tmp_path
        )
    with pytest.raises(MissingParts, match="a VAE with latents of cascade_b is missing"):
        assemble(registry, "x", SelectedFiles(diffusion_model="stage_b"), tmp_path)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


#: families that differ from another in sizes alone
ALIKE = {"cascade_c_lite": "cascade_c", "cascade_b_lite": "cascade_b"}


@pytest.mark.parametrize("name", ALIKE)
def test_the_lite_models_are_sampled_built_and_called_as_the_large_ones(name: str) -> None:
    lite, large = CASCADES[name], CASCADES[ALIKE[name]]
    sampling = replace(lite.sampling, model=large.sampling.model)
    text_set = large.text_set if lite.text_set else ""
    assert replace(lite, name=large.name, title=large.title, sampling=sampling, text_set=text_set) == large
    assert ARCHITECTURES[name] == ARCHITECTURES[ALIKE[name]]
    assert readings_of(name) == readings_of(ALIKE[name])


@pytest.mark.parametrize("name", [STAGE_C, STAGE_B])
def test_the_share_of_work_of_each_module_is_known_before_a_run(name: str, pair: Pair) -> None:
    """Plans that keep a part of the weights on a device go by it."""
    model = pair.catalog.find_model(name)
    work = typical_params(pair.engine._opened(model), Role.DIFFUSION_MODEL)
    assert isinstance(work, SampleParams)
    assert work.prior == (PriorCondition(24, 24) if name == STAGE_B else None)
    modules = pair.catalog.figures.modules(model, work)
    assert sum(module.flops > 0 for module in modules) > 0.9 * len(modules)
