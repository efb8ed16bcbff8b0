"""Qwen-Image layered, compared with its pipeline in diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered as layered
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.inference.guidance.call_model import patches_of
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.previews import PreviewKind, PreviewWish
from modelpool.pool.values.core.stage_params import DecodeParams, SampleParams, VideoFrames
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, words
from tests.pool.models.components.diffusion.image_published import as_diffusers
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
LAYERS, STEPS, SEED, CFG = 2, 3, 11, 4.0
WIDTH_PIXELS, HEIGHT_PIXELS = 96, 64
PROMPT, NEGATIVE = "a cat in front of a house", "blurry"


def _model() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=64, out_channels=16, num_layers=2, num_attention_heads=2, attention_head_dim=32,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 14, 14), use_additional_t_cond=True, use_layer3d_rope=True,
    )  # fmt: skip


def _vae() -> Any:
    return diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, num_res_blocks=1, input_channels=4)


TINY = TinyFamily(
    "qwen_image_layered",
    _model,
    as_diffusers,
    {"qwen25_7b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model."))},
    _vae,
    published.wan21,
)


def _image(width: int = WIDTH_PIXELS, height: int = HEIGHT_PIXELS) -> Image.Image:
    generator = np.random.default_rng(5)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _made(tiny: TinyModel, **fields: Any) -> Made:
    request = {"prompt": PROMPT, "negative": NEGATIVE, "steps": STEPS, "cfg": CFG, "seed": SEED, "frames": LAYERS}
    size = {"width": WIDTH_PIXELS, "height": HEIGHT_PIXELS}
    return tiny.made(**{**request, **size, "reference": _image(), **fields})


def _layers(made: Made) -> np.ndarray[Any, Any]:
    """The layers that are decoded."""
    (found,) = made.of(DecodeParams)
    assert isinstance(found, VideoFrames)
    return found.frames_THWC


class _Seeing(torch.nn.Module):
    """The language model where the pipeline looks for it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.dtype, self.device = model, torch.float32, torch.device("cpu")

    def forward(self, **inputs: Any) -> Any:
        """As the part that reads words."""
        return self.model(**inputs)


def _pipeline(tiny: TinyModel) -> Any:
    modules = {role: tiny.module(role) for role in (Role.VAE, Role.TEXT_ENCODER, Role.DIFFUSION_MODEL)}
    vae, facts = _vae(), tiny.engine._opened(tiny.model).latent
    vae.load_state_dict(modules[Role.VAE].state_dict())
    vae.register_to_config(latents_mean=facts.means, latents_std=facts.deviations)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02)
    encoder, tokenizer = _Seeing(modules[Role.TEXT_ENCODER]), for_transformers("qwen")
    return diffusers.QwenImageLayeredPipeline(
        scheduler, vae.eval(), encoder, tokenizer, None, modules[Role.DIFFUSION_MODEL]
    )


def _theirs(pipeline: Any, noise: Tensor, image: Image.Image) -> tuple[Tensor, Any]:
    """The latent and the layers, of the size of the image, which is smaller than any that the pipeline knows."""
    rows, latents = noise.transpose(1, 2).contiguous(), []

    def keep(_: Any, __: int, ___: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(found["latents"].clone())
        return {}

    call = {
        "prompt": PROMPT, "negative_prompt": NEGATIVE, "true_cfg_scale": CFG, "layers": noise.shape[2] - 1,
        "num_inference_steps": STEPS, "latents": pipeline._pack_latents(rows, 1, 16, *noise.shape[3:], noise.shape[2]),
        "output_type": "np", "callback_on_step_end": keep,
    }  # fmt: skip
    with mock.patch.object(layered, "calculate_dimensions", return_value=image.size), torch.no_grad():
        (layers,) = pipeline(image.convert("RGBA"), **call).images
    return pipeline._unpack_latents(latents[-1], image.height, image.width, noise.shape[2] - 1, 8), layers


def _noise() -> Tensor:
    return ImageNoise(SEED).draw((1, 16, LAYERS + 1, HEIGHT_PIXELS // 8, WIDTH_PIXELS // 8))


CASES = {
    "qwen_image_layered": Compared(
        TINY, diffusers.QwenImageLayeredPipeline, lambda *_: _noise(), lambda *_: {}, ("", "")
    )
}  # fmt: skip
LORAS = {"qwen_image_layered": ("transformer_blocks.0.attn.to_q", "diffusion_model.{}")}


class TestQwenImageLayered:
    """What every family shows, with an image to split."""

    weight: ClassVar[str] = LORAS["qwen_image_layered"][0]

    def test_texts_latents_and_layers_are_those_of_the_pipeline(self, tmp_path: Path) -> None:
        """Every layer with its opacity; the complete image before them is not decoded."""
        tiny = TinyFamilyModel(tmp_path, TINY)
        assert tiny.family.name == "qwen_image_layered"
        made, pipeline = _made(tiny), _pipeline(tiny)
        for name, text in (("prompt_embeds", PROMPT), ("negative_prompt_embeds", NEGATIVE)):
            expected = pipeline.encode_prompt(text, device=torch.device("cpu"))[0]
            torch.testing.assert_close(made.texts[name], expected, rtol=1e-4, atol=2e-5)
        latent, pixels = _theirs(pipeline, _noise(), _image())
        wide = max(1.0, float(latent.std()))
        torch.testing.assert_close(made.latents[0], latent, rtol=0.0, atol=1e-4 * wide)
        found = _layers(made)
        assert found.shape == (LAYERS, HEIGHT_PIXELS, WIDTH_PIXELS, 4)
        assert np.ptp(found[..., 3]) > 0
        assert np.abs(found / 255 - pixels).max() <= 1 / 255
        tiny.close()

    def test_both_namings_are_one_model(self) -> None:
        CASES["qwen_image_layered"].check_namings()

    def test_files_and_folders_are_the_same_model(self, tmp_path: Path) -> None:
        """The folder has the autoencoder of its pipeline, which reads four channels."""
        CASES["qwen_image_layered"].check_files(tmp_path)
        vae = json.loads((tmp_path / "folder/vae/config.json").read_text())
        assert (vae["_class_name"], vae["input_channels"]) == ("AutoencoderKLQwenImage", 4)

    def test_a_lora_gives_what_the_merged_file_gives(self, tmp_path: Path) -> None:
        for name in ("plain", "loras", "merged"):
            (tmp_path / name).mkdir()
        tiny = TinyFamilyModel(tmp_path / "plain", TINY, loras=(tmp_path / "loras",))
        generator = torch.Generator().manual_seed(3)
        sides = {"lora_B": (64, 2), "lora_A": (2, 64)}
        weights = {f"diffusion_model.{self.weight}.{name}.weight": torch.randn(*size, generator=generator) * 0.2
                   for name, size in sides.items()}  # fmt: skip
        save_file(weights, tmp_path / "loras/some.safetensors")
        without, patched = (_made(tiny, steps=2, **how).latents[0] for how in ({}, {"loras": ["some:0.8"]}))
        lora = Catalog((tmp_path / "plain",), (tmp_path / "loras",), "cpu").find_lora("some", 0.8)
        opened = tiny.engine._opened(tiny.model)
        save_checkpoint(opened, tmp_path / "merged/tiny.safetensors", loras=(lora,))
        tiny.close()
        write_tokenizers(tmp_path / "merged", TINY)
        merged = TinyModel.of_folder(tmp_path / "merged")
        expected = _made(merged, steps=2).latents[0]
        merged.close()
        assert not torch.allclose(without, expected, atol=1e-3)
        torch.testing.assert_close(patched, expected, rtol=0.0, atol=2e-5 * max(1.0, float(expected.abs().max())))


def test_the_shift_is_that_of_the_patches_of_one_image(tmp_path: Path) -> None:
    """However many layers there are, and also of a folder, whose last level counts."""
    save_file(TINY.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, TINY)
    checkpoint = open_checkpoint(tmp_path / "tiny.safetensors")
    facts = checkpoint.family.sampling
    by_size = facts.noise.shift_by_size
    assert by_size is not None
    for layers in (1, 4):
        patches = patches_of(facts, 640, 1024, layers)
        assert by_size.shift(patches, 50) == pytest.approx(np.exp((40 * 64 / 256) ** 0.5))
    save_diffusers(checkpoint, tmp_path / "folder")
    place = tmp_path / "folder/scheduler/scheduler_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"shift_terminal": 0.1}))
    noise = open_checkpoint(tmp_path / "folder").family.sampling.noise
    assert (noise.shift_by_size, noise.last_share) == (by_size, 0.1)


def test_layers_have_the_size_of_the_image_and_need_one(tmp_path: Path) -> None:
    """A size that is left out follows the image; what is for whole images is refused by name."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    made = _made(tiny, reference=_image(192, 64), width=None, steps=1, frames=1)
    (work,) = (work for work in made.works.values() if isinstance(work, SampleParams))
    assert (work.shape.width, work.shape.height, work.shape.frames, work.shape.leading) == (192, 64, 1, 1)
    assert _layers(made).shape == (1, 64, 192, 4)
    wish = PreviewWish(PreviewKind.LATENT_RGB)
    tiny.engine.prepare_previews(tiny.model, wish)
    assert tiny.engine.preview(tiny.model, made.latents[0][0, :, 0].numpy(), wish), "transparent pixels have a preview"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reference": None}, "reference"),
        ({"image": _image()}, "splits into layers as reference"),
        ({"image": _image(), "strength": 0.5}, "strength"),
        ({"format": "mp4"}, "png: model 'tiny' generates layers of images"),
        ({"seconds": 2.0}, "seconds"),
    ]
    for fields, why in refused:
        with pytest.raises(UnusableField, match=why):
            _made(tiny, **fields)
    tiny.close()


def test_the_autoencoder_of_images_is_refused_by_name(tmp_path: Path) -> None:
    """Layers without transparency cover each other."""
    save_file(TINY.file(), tmp_path / "tiny.safetensors")
    tensors = load_file(tmp_path / "tiny.safetensors")
    ends = {"vae.encoder.conv1.weight": 1, "vae.decoder.head.2.weight": 0, "vae.decoder.head.2.bias": 0}
    for key, place in ends.items():
        tensors[key] = tensors[key].narrow(place, 0, 3).contiguous()
    save_file(tensors, tmp_path / "tiny.safetensors")
    with pytest.raises(Exception, match="Qwen-Image"):
        open_checkpoint(tmp_path / "tiny.safetensors")


@pytest.mark.counted
def test_layers_run_within_what_was_counted(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured; one image is decoded at a time."""
    tiny = TinyFamilyModel(tmp_path, TINY, device="sim")
    made = _made(tiny, steps=1)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        assert cost.working_bytes <= task.activation_bytes, made.works[task.task_id]
        assert cost.working_bytes >= 0.8 * task.activation_bytes, made.works[task.task_id]
    tiny.close()
