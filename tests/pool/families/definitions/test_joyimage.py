"""JoyImage, compared with its pipeline in diffusers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BatchFeature, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from modelpool.pool.families.definitions import joyimage
from modelpool.pool.families.parts.text_reading import IMAGE_TOKEN
from modelpool.pool.inference.guidance.cfg_rescale import rescale
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.vision.qwen import QWEN_3, grid_of
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import CfgRescale, ReferenceMode
from modelpool.pool.values.core.stage_params import Encoded, EncodeParams, SampleParams, VisionEncodeParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import (
    Compared,
    FamilyTests,
    check_texts_of_a_batch,
    check_texts_of_two_lengths,
    noise_of,
    states,
)
from tests.pool.families.test_transformers_as_folders import assert_loaded, assert_same_model
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded, words
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.diffusion.image_published import as_diffusers
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny
from tests.pool.zoo.case import quiet_libraries

(READING,) = joyimage.FAMILIES[0].text.readings


def _model() -> Any:
    return diffusers.JoyImageEditTransformer3DModel(
        hidden_size=64,
        num_attention_heads=2,
        text_dim=WIDTH,
        num_layers=2,
        out_channels=16,
        rope_dim_list=[4, 14, 14],
        theta=10000,
    )


def _vae() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1)


class _Seeing(nn.Module):
    """The language model where the pipeline looks for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([model])
        self.device, self.dtype = torch.device("cpu"), torch.float32

    @property
    def model(self) -> Any:
        """What the pipeline looks into."""
        return SimpleNamespace(language_model=self.parts[0])

    def forward(self, **inputs: Any) -> Any:
        """As the part that reads words."""
        return self.parts[0](**inputs)


def _pipeline(encoder: Any, vae: Any, model: Any) -> Any:
    scheduler, tokenizer = FlowMatchEulerDiscreteScheduler(shift=1.5), for_transformers("qwen")
    return diffusers.JoyImageEditPipeline(scheduler, vae, _Seeing(encoder), tokenizer, model, None)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"context": _pipeline(modules[0], None, None).encode_prompt(prompt, torch.device("cpu"))[0]}


def _run(whole: Whole, texts: tuple[Encoded, ...], output: str) -> Tensor:
    """Of the size of the latent, which is smaller than any that the pipeline knows."""
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline, (width, height), noise = _pipeline(*modules), whole.sides, noise_of(whole)
    prompt, negative = map(states, texts)
    call = {
        "prompt_embeds": prompt, "prompt_embeds_mask": torch.ones(prompt.shape[:2]), "negative_prompt_embeds": negative,
        "negative_prompt_embeds_mask": torch.ones(negative.shape[:2]), "num_inference_steps": STEPS,
        "guidance_scale": 4.0, "latents": noise[:, None, :, None], "output_type": output,
    }  # fmt: skip
    with mock.patch.object(pipeline.vae_image_processor, "get_default_height_width", return_value=(height, width)):
        found: Tensor = pipeline(**call).images
    return found


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    return _run(whole, texts, "latent")


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    vae = whole.module(Role.VAE)
    means, deviations = (
        torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
    )
    found: Tensor = vae.decode(latent[:, :, None] * deviations + means).sample[:, :, 0]
    return found


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"joyimage": ("double_blocks.0.attn.img_attn_qkv", "diffusion_model.{}")}
CASES = {
    "joyimage": Compared(
        TinyFamily(
            "joyimage",
            _model,
            as_diffusers,
            {"qwen3vl_8b": (lambda: texts.qwen3_vl(words=words("qwen")), texts.under("model."))},
            _vae,
            published.wan21,
        ),
        diffusers.JoyImageEditPipeline,
        _latent,
        _texts,
        LORAS["joyimage"],
        decode=_decoded,
    )
}
(CASE,) = CASES.values()


class TestJoyImage(FamilyTests):
    case = CASE


def test_texts_of_a_batch_are_those_of_texts_alone() -> None:
    """States before the final norm, also of an empty text, and of one that is padded."""
    own = TextTokenizer(tiny("qwen"), "qwen")
    check_texts_of_a_batch(texts.qwen3_vl(words=words("qwen")), own, READING, _texts)


def test_predictions_for_texts_of_two_lengths_are_those_of_each_alone() -> None:
    """The module has no mask: padding would be read."""
    check_texts_of_two_lengths(joyimage.forward, seeded(_model, 1), 16)


def test_each_cell_is_rescaled_to_the_norm_of_its_prediction() -> None:
    """Also of a latent with frames; a cell of zeros stays finite."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 16, 4, 6), (1, 16, 1, 4, 6)):
        guided, cond = (torch.randn(shape, generator=generator) for _ in range(2))
        guided[..., 0, 0] = 0.0
        found = rescale(guided, cond, CfgRescale.CELLS)
        lengths = torch.linalg.vector_norm(found, dim=1)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(lengths[..., 1:, :], torch.linalg.vector_norm(cond, dim=1)[..., 1:, :])


#: as many blocks as the published one has, of which the first layers of the language part read three
VISION = {
    "depth": 27, "hidden_size": 64, "intermediate_size": 24, "num_heads": 16, "out_hidden_size": WIDTH,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
SIDES, SEED = (96, 64), 11
FIELDS: dict[str, Any] = {
    "prompt": "make the cat blue", "negative": "blurry", "width": 96, "height": 64, "steps": STEPS, "cfg": 4.0,
    "seed": SEED,
}  # fmt: skip


class _Placed(Qwen3VLForConditionalGeneration):
    """Its own class, told which tokens stand for an image, as newer versions want it."""

    def forward(self, input_ids: Tensor, **given: Any) -> Any:
        """As its own."""
        kinds = (input_ids == self.config.image_token_id).int()
        return super().forward(input_ids=input_ids, mm_token_type_ids=kinds, **given)


def seeing_encoder() -> Any:
    """A Qwen 3 VL, whose language part has more layers than read states of images."""
    text = texts.qwen3_vl(words=words("qwen"), layers=4)
    own: Any = text.config
    with quiet_libraries():
        config = transformers.Qwen3VLConfig(
            text_config=own.to_dict(), vision_config=VISION, image_token_id=tiny("qwen").token_to_id(IMAGE_TOKEN)
        )
        whole = _Placed(config)
    texts.seeded(whole)
    whole.model.language_model.load_state_dict(text.state_dict())
    return whole.eval().requires_grad_(False)


def _published(whole: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in whole.state_dict().items() if key != "lm_head.weight"}


SEEING = replace(CASE.tiny, encoders={"qwen3vl_8b": (seeing_encoder, _published)})


class _Processor:
    """What brings an image and texts into the form of the text encoder, without the videos, which want torchvision."""

    def __init__(self) -> None:
        self.tokenizer = for_transformers("qwen")
        bounds = {"shortest_edge": 65536, "longest_edge": 16777216}
        means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        self._images = Qwen2VLImageProcessorPil(patch_size=16, size=bounds, **means)

    def __call__(self, text: list[str], images: Any, **_: Any) -> BatchFeature:
        """A token for each state of the image, and its patches."""
        shown = self._images(images=images, return_tensors="pt")
        ((before, after),) = (one.split(IMAGE_TOKEN) for one in text)
        count = int(shown["image_grid_thw"].prod()) // 4
        tokens = self.tokenizer([before + IMAGE_TOKEN * count + after], return_tensors="pt")
        return BatchFeature(
            {"input_ids": tokens["input_ids"], "attention_mask": torch.ones_like(tokens["input_ids"]), **shown}
        )


def _image(width: int = SIDES[0], height: int = SIDES[1]) -> Image.Image:
    generator = np.random.default_rng(5)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _edited(tiny_model: TinyModel, image: Image.Image) -> tuple[list[Tensor], Tensor, Any]:
    """Both texts, the latent and the pixels of the pipeline. Its encoder draws from what it says of an image; here, as
    in ours, it is the mean."""
    vae, model = (tiny_model.module(role) for role in (Role.VAE, Role.DIFFUSION_MODEL))
    processor, read = _Processor(), list[Tensor]()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.5)
    parts = seeing_encoder(), processor.tokenizer, model, processor
    pipeline = diffusers.JoyImageEditPipeline(scheduler, vae, *parts)
    encode = pipeline.encode_prompt_multiple_images

    def keep(*given: Any, **named: Any) -> Any:
        found = encode(*given, **named)
        read.append(found[0])
        return found

    (width, height), noise = image.size, ImageNoise(SEED).draw((1, 16, image.height // 8, image.width // 8))
    call = {
        "image": image, "prompt": FIELDS["prompt"], "negative_prompt": FIELDS["negative"], "guidance_scale": 4.0,
        "num_inference_steps": STEPS, "latents": noise[:, None, :, None],
    }  # fmt: skip
    with (
        mock.patch.object(pipeline.vae_image_processor, "get_default_height_width", return_value=(height, width)),
        mock.patch.object(pipeline, "encode_prompt_multiple_images", keep),
        mock.patch.object(DiagonalGaussianDistribution, "sample", DiagonalGaussianDistribution.mode),
        torch.no_grad(),
    ):
        latent = pipeline(**call, output_type="latent").images
        pixels = pipeline(**call, output_type="np").images[0]
    return read[:2], latent, pixels


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_an_image_is_edited_as_the_pipeline_edits_it(tmp_path: Path) -> None:
    """Texts that see it, latent and pixels; from the file, and from a folder that libraries load."""
    for name in ("file", "folder"):
        (tmp_path / name).mkdir()
    own = TinyFamilyModel(tmp_path / "file", SEEING)
    assert own.family.sampling.reference_mode is ReferenceMode.WHOLE
    seen, latent, pixels = _edited(own, _image())
    own.close()
    checkpoint, folder = open_checkpoint(tmp_path / "file/tiny.safetensors"), tmp_path / "folder/tiny"
    save_diffusers(checkpoint, folder)
    assert_loaded(checkpoint, folder)
    assert_same_model(checkpoint, open_checkpoint(folder))
    for place in ("file", "folder"):
        model = TinyModel.of_folder(tmp_path / place)
        made = model.made(**FIELDS, reference=_image())
        assert sum(isinstance(work, VisionEncodeParams) for work in made.works.values()) == 1
        for name, text in zip(("prompt_embeds", "negative_prompt_embeds"), seen, strict=True):
            np.testing.assert_allclose(made.texts[name], text, atol=1e-5 * max(1.0, float(text.std())))
        np.testing.assert_allclose(made.latents[0], latent, atol=1e-4 * max(1.0, float(latent.std())))
        assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255
        plain = model.made(**FIELDS)
        assert not np.allclose(plain.latents[0], latent, atol=0.01)
        model.close()


def test_the_image_has_the_size_of_the_output_and_is_a_single_one(tmp_path: Path) -> None:
    tiny_model = TinyFamilyModel(tmp_path, SEEING)
    made = tiny_model.made(**{**FIELDS, "width": 64, "height": 128, "steps": 1}, reference=_image(64, 64))
    (work,) = (work for work in made.works.values() if isinstance(work, SampleParams))
    assert [(each.width, each.height) for each in work.references] == [(64, 128)]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reference": [_image(), _image(64, 64)]}, "accepts only one"),
        ({"reference": _image(), "reference_as": "numbered"}, "reads a whole image"),
    ]
    for fields, why in refused:
        with pytest.raises(UnusableField, match=why):
            tiny_model.made(**FIELDS, **fields)
    tiny_model.close()


def test_another_vision_part_is_left_out_and_named_where_it_is_needed(tmp_path: Path) -> None:
    """Texts alone still work."""
    save_file(SEEING.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, SEEING)
    tensors, key = load_file(tmp_path / "tiny.safetensors"), "visual.deepstack_merger_list.2.norm.weight"
    save_file({name: x for name, x in tensors.items() if not name.endswith(key)}, tmp_path / "tiny.safetensors")
    tiny_model = TinyModel.of_folder(tmp_path)
    with pytest.raises(UnusableField, match=r"not that of Qwen 3 VL.*found no deepstack_merger_list.2.norm.weight"):
        tiny_model.made(**FIELDS, reference=_image())
    assert tiny_model.made(**FIELDS).pixels.shape == (64, 96, 3)
    tiny_model.close()


@pytest.mark.counted
def test_an_edit_runs_within_what_was_counted(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured."""
    tiny_model = TinyFamilyModel(tmp_path, SEEING, device="sim")
    made = tiny_model.made(**{**FIELDS, "steps": 1}, reference=_image())
    for task, cost in zip(made.tasks, made.costs, strict=True):
        work = made.works[task.task_id]
        if isinstance(work, (VisionEncodeParams, EncodeParams, SampleParams)):
            assert cost.working_bytes <= task.activation_bytes, work
            assert cost.working_bytes >= 0.8 * task.activation_bytes, work
    tiny_model.close()


def test_images_have_the_grid_of_the_processor() -> None:
    """Also those that are scaled into the limits."""
    processor = _Processor()
    for size in ((96, 64), (1024, 960), (40, 2000)):
        shown = processor._images(images=[_image(*size)], return_tensors="pt")
        rows, columns = grid_of(size, QWEN_3)
        assert shown["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
