"""Qwen-Image's editing models run whole: of an image that they and their text encoder see they make what diffusers'
pipelines make of it, on the same weights, texts and noise; from a file and from a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.graph.features.image_concat_graph import reference_size
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.vision.qwen import grid_of
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import ReferenceMode
from modelpool.pool.values.core.stage_params import EncodeParams, SampleParams, VisionEncodeParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_qwen_edit import SEEING, Processor, seeing_encoder
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES, seeded
from tests.pool.models.text.tiny_tokenizers import tiny as tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDTH, HEIGHT, STEPS, SEED, CFG = 64, 48, 3, 11, 4.0
PROMPT, NEGATIVE = "make the cat blue", "blurry"
FIELDS: dict[str, Any] = {
    "prompt": PROMPT, "negative": NEGATIVE, "width": WIDTH, "height": HEIGHT, "steps": STEPS, "cfg": CFG, "seed": SEED,
}  # fmt: skip


def pipeline_of(tiny: TinyModel, kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """diffusers' own, which sees images as large as they are here: published models want a million pixels."""
    vae, facts = tiny.module(Role.VAE), tiny.engine._opened(tiny.model).latent
    vae.register_to_config(latents_mean=facts.means, latents_std=facts.deviations)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    processor = Processor()
    pipeline = kind(scheduler, vae, seeing_encoder(), processor.tokenizer, processor, tiny.module(Role.DIFFUSION_MODEL))
    pipeline.set_progress_bar_config(disable=True)
    is_numbered = isinstance(pipeline, diffusers.QwenImageEditPlusPipeline)
    rest = () if is_numbered else (None,)

    def sides(area: int, ratio: float) -> tuple[Any, ...]:
        return *reference_size((round(ratio * 10**6), 10**6), min(area, WIDTH * HEIGHT), 32), *rest

    place = f"diffusers.pipelines.qwenimage.pipeline_qwenimage_edit{'_plus' if is_numbered else ''}"
    monkeypatch.setattr(f"{place}.calculate_dimensions", sides)
    return pipeline


def drawn(tiny: TinyModel, pipeline: Any, images: Any) -> tuple[list[Tensor], Tensor, np.ndarray[Any, Any]]:
    """Both texts, the latent and the pixels."""
    read: list[Tensor] = []
    encode = pipeline.encode_prompt

    def keep(*given: Any, **named: Any) -> Any:
        found = encode(*given, **named)
        read.append(found[0])
        return found

    pipeline.encode_prompt = keep
    noise = ImageNoise(SEED).draw((1, *latent_shape(WIDTH, HEIGHT, 0, tiny.engine._opened(tiny.model).latent)))
    call = {
        "image": images, "prompt": PROMPT, "negative_prompt": NEGATIVE, "true_cfg_scale": CFG, "height": HEIGHT,
        "width": WIDTH, "num_inference_steps": STEPS,
        "latents": pipeline._pack_latents(noise.unsqueeze(2), 1, noise.shape[1], *noise.shape[2:]),
    }  # fmt: skip
    with torch.no_grad():
        found = pipeline(**call, output_type="latent").images
        pixels = pipeline(**call, output_type="np").images[0]
    unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
    return read[:2], unpacked[:, :, 0], pixels


def assert_drawn(made: Made, expected: tuple[list[Tensor], Tensor, np.ndarray[Any, Any]]) -> None:
    """Text, latent and pixels are the same."""
    texts, latent, pixels = expected
    for name, text in zip(("prompt_embeds", "negative_prompt_embeds"), texts, strict=True):
        np.testing.assert_allclose(made.texts[name], text, atol=1e-5 * max(1.0, float(text.std())))
    assert float(latent.std()) > 0
    np.testing.assert_allclose(made.latents[0], latent, atol=1e-4 * max(1.0, float(latent.std())))
    assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255


def _one(width: int, height: int) -> list[Image.Image]:
    return [image(width, height)]


#: what they are compared with: the first one, and those that were trained with numbers
PIPELINES = {"qwen_image": (diffusers.QwenImageEditPipeline, diffusers.QwenImageEditPlusPipeline)}
ONE, NUMBERED = PIPELINES["qwen_image"]
#: the pipeline of each, and the images
EDITS: dict[str, tuple[type, list[Image.Image]]] = {
    "an image": (ONE, _one(32, 96)),
    "a wide image that is made smaller": (ONE, _one(192, 64)),
    "an image with a number": (NUMBERED, _one(32, 96)),
    "two images": (NUMBERED, [*_one(96, 32), *_one(32, 96)]),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_image_is_edited_as_diffusers_edits_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, latent and pixels, guided by what both texts say of the image."""
    kind, images = EDITS[name]
    tiny = TinyFamilyModel(tmp_path, SEEING)
    assert tiny.family.name == "qwen_image"
    is_numbered = kind is NUMBERED
    how = {"reference_as": "numbered"} if is_numbered and len(images) == 1 else {}
    made = tiny.made(**FIELDS, reference=images, **how)
    assert [work.numbered for work in made.works.values() if isinstance(work, EncodeParams)] == [is_numbered] * 2
    assert sum(isinstance(work, VisionEncodeParams) for work in made.works.values()) == len(images)
    pipeline = pipeline_of(tiny, kind, monkeypatch)
    assert_drawn(made, drawn(tiny, pipeline, images if is_numbered else images[0]))
    tiny.close()


def with_tensors(tiny: TinyModel, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> TinyModel:
    """The model of the file of `tiny`, which is closed, with other tensors in it."""
    path = Path(tiny.model.path)
    tiny.close()
    save_file(change(load_file(path)), path)
    return TinyModel.of_folder(path.parent)


def test_a_file_with_the_marker_of_2511_is_edited_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called. The model is told that the image is without noise, as diffusers tells it."""
    marker = {"model.diffusion_model.__index_timestep_zero__": torch.tensor([])}
    tiny = with_tensors(TinyFamilyModel(tmp_path, SEEING), lambda tensors: tensors | marker)
    assert tiny.family.sampling.reference_mode is ReferenceMode.NUMBERED
    assert tiny.module(Role.DIFFUSION_MODEL).config.zero_cond_t
    made = tiny.made(**FIELDS, reference=image(32, 96))
    assert [work.numbered for work in made.works.values() if isinstance(work, EncodeParams)] == [True] * 2
    assert_drawn(made, drawn(tiny, pipeline_of(tiny, NUMBERED, monkeypatch), _one(32, 96)))
    tiny.close()


TEXTS = "text_encoders.qwen25_7b.transformer."
PATCHES = f"{TEXTS}visual.patch_embed.proj.weight"
#: what is done to the part that sees images, and why it shows none then
OTHER_PARTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "larger patches": (lambda x: x | {PATCHES: torch.zeros(64, 3, 2, 16, 16)}, "patch_embed.proj.weight of shape"),
    "positions": (lambda x: x | {f"{TEXTS}visual.pos_embed.weight": torch.zeros(4, 4)}, "found pos_embed.weight"),
    "no patches": (lambda x: {k: v for k, v in x.items() if k != PATCHES}, "found no patch_embed.proj.weight"),
    "no merger": (lambda x: {k: v for k, v in x.items() if "visual.merger" not in k}, "found no merger.mlp.2.bias"),
    "other states": (
        lambda x: {k: v[: len(v) // 2].clone() if ".merger.mlp.2." in k else v for k, v in x.items()},
        "found states of width",
    ),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_a_part_that_is_not_qwen_25_vls_is_left_out_and_said_where_it_is_needed(name: str, tmp_path: Path) -> None:
    """The rest draws what it draws without one."""
    change, why = OTHER_PARTS[name]
    tiny = TinyFamilyModel(tmp_path, SEEING)
    fields = {**FIELDS, "steps": 1}
    expected = tiny.made(**fields).pixels
    tiny = with_tensors(tiny, change)
    assert Role.VISION_ENCODER not in tiny.family.prefixes
    np.testing.assert_array_equal(tiny.made(**fields).pixels, expected)
    with pytest.raises(UnusableField, match=f"is not that of Qwen 2.5 VL, which editing requires: .*{why}"):
        tiny.made(**fields, reference=image(32, 96))
    tiny.close()


def test_a_image_beside_the_words_changes_what_they_say(tmp_path: Path) -> None:
    """And the places of its rows and columns do: one of the same states in one row reads otherwise."""
    tiny = TinyFamilyModel(tmp_path, SEEING)
    high, wide = (tiny.made(**FIELDS, reference=image(*size)).texts for size in ((32, 96), (96, 32)))
    assert high["prompt_embeds"].shape == wide["prompt_embeds"].shape
    assert not torch.allclose(high["prompt_embeds"], wide["prompt_embeds"], atol=1e-3)
    plain = tiny.made(**FIELDS).texts
    assert plain["prompt_embeds"].shape[1] < high["prompt_embeds"].shape[1]
    tiny.close()


def test_words_have_weights_beside_a_image(tmp_path: Path) -> None:
    """The image has none: it stands before the words, whose states alone are moved."""
    tiny = TinyFamilyModel(tmp_path, SEEING)
    plain, weighted = (
        tiny.made(**{**FIELDS, "prompt": prompt, "steps": 1}, reference=image(32, 96)).texts["prompt_embeds"][0]
        for prompt in ("make the cat blue", "make the (cat:1.4) blue")
    )
    moved = [place for place, same in enumerate((plain == weighted).all(dim=-1)) if not same]
    assert moved
    rows, columns = grid_of((32, 96))
    assert min(moved) > rows * columns
    assert len(moved) < len(plain) // 2
    tiny.close()


def test_without_a_image_it_is_qwen_image(tmp_path: Path) -> None:
    """The part that sees images is a component that nothing uses then: the image is the image of a file without it."""
    for name in ("seeing", "blind"):
        (tmp_path / name).mkdir()
    seeing, blind = (
        TinyFamilyModel(tmp_path / "seeing", SEEING),
        TinyFamilyModel(tmp_path / "blind", FAMILIES["qwen_image"]),
    )
    assert Role.VISION_ENCODER in seeing.family.prefixes
    assert Role.VISION_ENCODER not in blind.family.prefixes
    np.testing.assert_array_equal(seeing.made(**FIELDS).pixels, blind.made(**FIELDS).pixels)
    found = seeing.catalog.find_model("tiny").components, blind.catalog.find_model("tiny").components
    digests = [{role: key.partition("@")[2] for role, key in components} for components in found]
    assert digests[0].pop(Role.VISION_ENCODER)
    assert digests[0] == digests[1]
    with pytest.raises(UnusableField, match="without the vision part"):
        blind.made(**FIELDS, reference=image())
    seeing.close()
    blind.close()


def test_the_file_saved_again_edits_the_same(tmp_path: Path) -> None:
    """Tensor for tensor, those of the part that sees images too."""
    tiny = TinyFamilyModel(tmp_path, SEEING)
    expected = tiny.made(**FIELDS, reference=image(32, 96)).pixels
    path = Path(tiny.model.path)
    tiny.close()
    before = load_file(path)
    save_checkpoint(open_checkpoint(path), tmp_path / "again.safetensors")
    (tmp_path / "again.safetensors").rename(path)
    after = load_file(path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = TinyModel.of_folder(tmp_path)
    np.testing.assert_array_equal(again.made(**FIELDS, reference=image(32, 96)).pixels, expected)
    again.close()


def test_a_lora_draws_what_the_merged_file_draws(tmp_path: Path) -> None:
    """On the diffusion model of an edit."""
    loras = tmp_path / "loras"
    for folder in ("plain", "merged", "loras"):
        (tmp_path / folder).mkdir()
    weight = "transformer_blocks.0.attn.to_q"
    tiny = TinyFamilyModel(tmp_path / "plain", SEEING, loras=(loras,))
    shape = open_checkpoint(tiny.model.source).shapes[f"model.diffusion_model.{weight}.weight"]
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator)
    save_file(
        {f"transformer.{weight}.lora_B.weight": up * 0.1, f"transformer.{weight}.lora_A.weight": down},
        loras / "some.safetensors",
    )
    fields = {**FIELDS, "reference": image(32, 96), "steps": 2}
    without, drawn_so = (tiny.made(**fields, loras=own).latents[0] for own in ((), ("some:0.8",)))
    lora = tiny.catalog.find_lora("some", 0.8)
    save_checkpoint(tiny.engine._opened(tiny.model), tmp_path / "merged" / "tiny.safetensors", loras=(lora,))
    tiny.close()
    for tokenizer in (tmp_path / "plain").glob("tokenizer_*"):
        tokenizer.rename(tmp_path / "merged" / tokenizer.name)
    merged = TinyModel.of_folder(tmp_path / "merged")
    expected = merged.made(**fields).latents[0]
    merged.close()
    assert not torch.allclose(without, expected, atol=1e-3)
    torch.testing.assert_close(drawn_so, expected, rtol=0.0, atol=2e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(("side", "sides"), [(64, ((96, 32), (32, 96))), (256, ((256, 256),))])
@pytest.mark.counted
def test_it_runs_within_what_was_counted(side: int, sides: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured: seeing in one window and in many, reading, sampling
    with an image and with two."""
    tiny = TinyFamilyModel(tmp_path, SEEING, device="sim")
    fields = {**FIELDS, "width": side, "height": side, "steps": 2}
    made = tiny.made(**fields, reference=[image(*size) for size in sides])
    for task, cost in zip(made.tasks, made.costs, strict=True):
        work = made.works[task.task_id]
        if isinstance(work, (VisionEncodeParams, EncodeParams, SampleParams)):
            assert cost.working_bytes <= task.activation_bytes, work
            assert cost.working_bytes >= 0.9 * task.activation_bytes, work
    tiny.close()


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_text_as_long_as_one_beside_a_image_holds_less(is_seen_first: bool, tmp_path: Path) -> None:
    """Tokens that are told do not count it: those before the image are dropped. Each is counted by itself, in any
    order."""
    tiny = TinyFamilyModel(tmp_path, SEEING, device="sim")
    size, prompt = (96, 32), "cat"
    wanted = tiny.catalog.text_tokens(tiny.model, prompt, (size,))
    texts = (" ".join([prompt] * words) for words in range(1, 400))
    plain = next(text for text in texts if tiny.catalog.text_tokens(tiny.model, text) == wanted)
    fields = {**FIELDS, "negative": "", "width": 96, "height": 32, "steps": 1, "cfg": 1.0}
    asked: list[dict[str, Any]] = [{"prompt": prompt, "reference": image(*size)}, {"prompt": plain}]
    counted = []
    for one in asked if is_seen_first else asked[::-1]:
        made = tiny.made(**{**fields, **one})
        for task, cost in zip(made.tasks, made.costs, strict=True):
            if isinstance(made.works[task.task_id], EncodeParams):
                assert cost.working_bytes <= task.activation_bytes
                counted.append(task.activation_bytes)
    seen, read = counted if is_seen_first else counted[::-1]
    assert read < seen
    tiny.close()


def write_folder(folder: Path, pipeline: str = "QwenImageEditPlusPipeline") -> None:
    """The parts of the tiny model as their libraries save them: its text encoder whole, under the names of today."""
    index: dict[str, Any] = {"_class_name": pipeline}

    def save(part: Any, place: str, library: str) -> None:
        part.save_pretrained(folder / place)
        index[place] = [library, type(part).__name__.removeprefix("_")]

    folder.mkdir(parents=True)
    save(seeded(SEEING.model, 1), "transformer", "diffusers")
    save(seeded(SEEING.vae, 2), "vae", "diffusers")
    save(seeing_encoder(), "text_encoder", "transformers")
    scheduler = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    save(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **scheduler), "scheduler", "diffusers")
    (folder / "tokenizer").mkdir()
    tiny_tokenizer("qwen").save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "model_index.json").write_text(json.dumps(index))


def test_a_folder_of_diffusers_edits_as_the_file_does(tmp_path: Path) -> None:
    """Its pipeline says that images have numbers."""
    (tmp_path / "file").mkdir()
    file = TinyFamilyModel(tmp_path / "file", SEEING)
    write_folder(tmp_path / "folders" / "tiny")
    folder = TinyModel.of_folder(tmp_path / "folders")
    assert folder.family.sampling.reference_mode is ReferenceMode.NUMBERED
    fields = {**FIELDS, "reference": image(32, 96)}
    expected, found = file.made(**fields, reference_as="numbered"), folder.made(**fields)
    near = 1e-5 * max(1.0, float(expected.latents[0].abs().max()))
    np.testing.assert_allclose(found.latents[0], expected.latents[0], atol=near)
    assert np.abs(found.pixels.astype(int) - expected.pixels).max() <= 1
    file.close()
    folder.close()


@pytest.mark.parametrize(
    ("pipeline", "vision_use"),
    [("QwenImageEditPipeline", ReferenceMode.WHOLE), ("QwenImagePipeline", ReferenceMode.BY_NAME)],
)
def test_a_folder_of_the_first_pipeline_has_images_seen_whole(
    pipeline: str, vision_use: ReferenceMode, tmp_path: Path
) -> None:
    """Another says nothing of it: its name may."""
    write_folder(tmp_path / "tiny", pipeline)
    assert open_checkpoint(tmp_path / "tiny").family.sampling.reference_mode is vision_use
