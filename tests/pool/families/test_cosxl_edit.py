"""CosXL edit runs whole: it makes of an image what diffusers' pipeline makes of it, on the same weights, texts and
noise; from its file, and from the folder that the file is saved to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import ImageConcat, NoiseKind, Prediction
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS, SHOWN_TENSORS

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PIPELINES = {"cosxl_edit": diffusers.StableDiffusionXLInstructPix2PixPipeline}
PROMPT, NEGATIVE, STEPS, SEED, CFG = "make it a red cube", "blurry", 4, 11, 5.0
WIDTH, HEIGHT = 64, 48
FIELDS: dict[str, Any] = {"image": image(), "prompt": PROMPT, "negative": NEGATIVE, "steps": STEPS, "seed": SEED}


def opened(folder: Path) -> TinyModel:
    """The tiny model, in a file with ends of noise that are not the published ones."""
    folder.mkdir()
    return TinyModel(folder, SHOWN_LAYOUTS["cosxl_edit"](), tensors=SHOWN_TENSORS["cosxl_edit"])


def drawn(folder: Path, image_cfg: float) -> tuple[dict[str, Tensor], Tensor, np.ndarray[Any, Any]]:
    """The texts, the latent and the pixels of diffusers."""
    pipeline: Any = PIPELINES["cosxl_edit"].from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    with torch.no_grad():
        read = pipeline.encode_prompt(
            PROMPT, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True, negative_prompt=NEGATIVE
        )
        call = {
            "prompt": PROMPT, "negative_prompt": NEGATIVE, "image": image(), "height": HEIGHT, "width": WIDTH,
            "num_inference_steps": STEPS, "guidance_scale": CFG, "image_guidance_scale": image_cfg,
            "latents": ImageNoise(SEED).draw((1, 4, HEIGHT // 8, WIDTH // 8)),
        }  # fmt: skip
        latent = pipeline(**call, output_type="latent").images
        pixels = pipeline(**call, output_type="np").images[0]
    return dict(zip(names, read, strict=True)), latent, pixels


@pytest.mark.parametrize("image_cfg", [1.5, 1.0])
def test_a_image_is_changed_as_diffusers_changes_it(image_cfg: float, tmp_path: Path) -> None:
    """Text, latent and pixels. The pipeline loads the folder that we save, with the flag that scales the image."""
    tiny = opened(tmp_path / "file")
    assert tiny.family.name == "cosxl_edit"
    made = tiny.made(**FIELDS, image_cfg=image_cfg)
    save_diffusers(open_checkpoint(tiny.model.source), tmp_path / "folder")
    tiny.close()
    texts, latent, pixels = drawn(tmp_path / "folder", image_cfg)
    for told, states in made.texts.items():
        np.testing.assert_allclose(states, texts.pop(told), atol=1e-5)
    assert texts == {}
    np.testing.assert_allclose(made.latents[0], latent, atol=1e-4 * max(1.0, float(latent.std())))
    assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255


def test_folder_and_file_make_the_same_again(tmp_path: Path) -> None:
    """The folder keeps what the image is told as and the ends of noise; the file saved again is the file."""
    (tmp_path / "folder").mkdir()
    tiny = opened(tmp_path / "file")
    save_diffusers(open_checkpoint(tiny.model.source), tmp_path / "folder" / "tiny")
    save_checkpoint(open_checkpoint(tiny.model.source), tmp_path / "again.safetensors")
    fields = {**FIELDS, "steps": 2}
    expected, plain = tiny.made(**fields), tiny.model.path
    tiny.close()
    folder = TinyModel.of_folder(tmp_path / "folder")
    assert (folder.family.name, folder.family.sampling) == ("cosxl_edit", tiny.family.sampling)
    made = folder.made(**fields)
    folder.close()
    np.testing.assert_allclose(
        made.latents[0], expected.latents[0], atol=1e-4 * max(1.0, float(expected.latents[0].std()))
    )
    (tmp_path / "again.safetensors").rename(Path(plain))
    again = TinyModel.of_folder(tmp_path / "file")
    np.testing.assert_array_equal(again.made(**fields).pixels, expected.pixels)
    again.close()


def test_it_is_told_by_its_ends_of_noise_alone(tmp_path: Path) -> None:
    """A file of the same shapes without them is SDXL's InstructPix2Pix: noise by a table, the image unscaled."""
    tiny = opened(tmp_path / "file")
    sampling = tiny.family.sampling
    assert (sampling.prediction, sampling.noise.kind, sampling.image_concat) == (
        Prediction.VELOCITY, NoiseKind.EDM, ImageConcat.LATENT,
    )  # fmt: skip
    assert (sampling.noise.sigma_min, sampling.noise.sigma_max) == (pytest.approx(0.01), 60.0)
    tiny.close()
    (tmp_path / "plain").mkdir()
    plain = TinyModel(tmp_path / "plain", SHOWN_LAYOUTS["cosxl_edit"]())
    assert (plain.family.name, plain.family.sampling.image_concat) == ("sdxl_ip2p", ImageConcat.UNSCALED)
    plain.close()


def test_ends_of_noise_count_beside_the_marker_of_noise_alone(tmp_path: Path) -> None:
    """The model predicts velocity then, which the marker asks for; its levels are those between the ends."""
    (tmp_path / "marked").mkdir()
    plain = opened(tmp_path / "file")
    tensors = {**SHOWN_TENSORS["cosxl_edit"], "ztsnr": torch.tensor([])}
    marked = TinyModel(tmp_path / "marked", SHOWN_LAYOUTS["cosxl_edit"](), tensors=tensors)
    assert marked.family.name == "cosxl_edit"
    assert marked.family.sampling == plain.family.sampling
    assert marked.family.sampling.prediction is Prediction.VELOCITY
    fields = {**FIELDS, "steps": 1}
    np.testing.assert_array_equal(marked.made(**fields).pixels, plain.made(**fields).pixels)
    plain.close()
    marked.close()


def test_a_folder_of_its_noise_that_does_not_say_so_is_refused(tmp_path: Path) -> None:
    """Without the flag pipelines would tell the model its image unscaled, which it was not trained with."""
    tiny = opened(tmp_path / "file")
    save_diffusers(open_checkpoint(tiny.model.source), tmp_path / "folder")
    tiny.close()
    index = tmp_path / "folder" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "is_cosxl_edit": False}))
    with pytest.raises(UnknownArchitecture, match="found 'EDMEulerScheduler', expected a scheduler of Stable Diff"):
        open_checkpoint(tmp_path / "folder")
