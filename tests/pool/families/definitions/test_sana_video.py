"""Sana Video, compared with its pipeline in diffusers."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.families.definitions import sana_video
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families import test_videos_from_images as from_images
from tests.pool.families.definitions import test_sana as sana
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded
from tests.pool.families.whole_transformer import STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.text.tiny_tokenizers import for_transformers

CFG = 6.0
(READING,) = sana_video.FAMILIES[0].text.readings


def _model(**more: Any) -> Any:
    sizes = {
        "num_layers": 2, "num_attention_heads": 1, "num_cross_attention_heads": 1, "cross_attention_dim": 112,
        "caption_channels": WIDTH, "mlp_ratio": 3.0,
    }  # fmt: skip
    return diffusers.SanaVideoTransformer3DModel(**{**sizes, **more})


def _publish(state: State) -> File:
    """As Sana, with a convolution over frames in each block."""
    temporal = {key: tensor for key, tensor in state.items() if ".ff.conv_temp." in key}
    rest = {key.replace("patch_embedding.", "patch_embed."): x for key, x in state.items() if key not in temporal}
    rest = {key.replace("patch_embed.", "patch_embed.proj."): tensor for key, tensor in rest.items()}
    named = {
        key.replace("transformer_blocks.", "blocks.").replace(".ff.conv_temp.", ".mlp.t_conv."): tensor
        for key, tensor in temporal.items()
    }
    return sana._publish(rest) | named


def _pipeline(encoder: Any, tokenizer: Any, vae: Any, model: Any) -> Any:
    return diffusers.SanaVideoPipeline(tokenizer, encoder, vae, model, FlowMatchEulerDiscreteScheduler(shift=8.0))


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    pipeline = _pipeline(modules[0], for_transformers("gemma"), None, None)
    instruction = READING.template.removesuffix("{}").split("\n")
    with torch.no_grad():
        found = pipeline.encode_prompt(prompt, False, device=torch.device("cpu"), complex_human_instruction=instruction)
    return {"context": found[0], "context_mask": found[1].bool()}


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    modules = [whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL)]
    pipeline = _pipeline(modules[0], None, *modules[1:])
    masks = [torch.from_numpy(text.others["context_mask"])[None] for text in texts]
    width, height = whole.sides
    found: Tensor = pipeline(
        prompt=None, negative_prompt=None, height=height, width=width, frames=whole.frames, guidance_scale=CFG,
        prompt_embeds=states(texts[0]), prompt_attention_mask=masks[0].float(),
        negative_prompt_embeds=states(texts[1]), negative_prompt_attention_mask=masks[1].float(),
        use_resolution_binning=False, output_type="latent", latents=noise_of(whole), num_inference_steps=STEPS,
        # those of the published scheduler, but for a thousandth
        sigmas=[1 - step / STEPS for step in range(STEPS)],
    ).frames  # fmt: skip
    return found


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    facts = whole.opened.latent
    means, deviations = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (facts.means, facts.deviations))
    found: Tensor = whole.module(Role.VAE).decode(latent * deviations + means).sample
    return found


LORAS = {"sana_video": ("blocks.0.attn.qkv", "diffusion_model.{}")}
CASES = {
    "sana_video": Compared(
        TinyFamily(
            "sana_video", _model, _publish, sana._GEMMA, from_images.CONCATENATED.vae, from_images.CONCATENATED.vae_file
        ),
        diffusers.SanaVideoPipeline,
        _latent,
        _texts,
        LORAS["sana_video"],
        decode=_decoded,
    )
}


class TestSanaVideo(FamilyTests):
    case = CASES["sana_video"]


def test_the_instruction_is_the_default_of_the_pipelines_call() -> None:
    default = inspect.signature(diffusers.SanaVideoPipeline.__call__).parameters["complex_human_instruction"].default
    assert READING.template == "\n".join(default) + "{}"


@pytest.mark.parametrize("published", [True, False])
def test_the_model_with_another_autoencoder_is_not_taken_for_it_and_neither_for_sana(published: bool) -> None:
    """The one for 720 lines has patches of single cells and more channels. All keys of Sana are in its file, too."""
    for more, name in (({}, "sana_video"), ({"in_channels": 32, "out_channels": 32, "patch_size": (1, 1, 1)}, "")):
        state = seeded(partial(_model, **more), 1).state_dict()
        file = _publish(state) if published else state
        found = recognise_diffusion({key: tuple(value.shape) for key, value in file.items()})
        assert found is not None
        assert (found.name, found.title.split(",")[0]) == (name, "Sana Video")
