"""A tiny HunyuanVideo that goes on from an image, which its text encoder sees: a LLaVA, whose two parts are files of
their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import transformers
from torch import Tensor

from tests.pool.families.test_videos_from_images import louder
from tests.pool.families.tiny_transformers import CLIP_L, FAMILIES, WIDTH, File, TinyFamily, prefixed, seeded, words
from tests.pool.models.components.diffusion import video_published
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import tiny
from tests.pool.zoo.case import quiet_libraries

#: pixels a side of what is seen, of a patch, and the states that there are
SIDE, PATCH = 56, 14
STATES = (SIDE // PATCH) ** 2
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 16, "image_size": SIDE,
    "patch_size": PATCH, "projection_dim": 24, "hidden_act": "quick_gelu", "model_type": "clip_vision_model",
}  # fmt: skip


def llava() -> Any:
    """Both parts as their own class has them."""
    text = texts.llama(words=words("llama3"), layers=4)
    own: Any = text.config
    tokenizer = tiny("llama3")
    with quiet_libraries():
        config = transformers.LlavaConfig(
            text_config=own.to_dict(), vision_config=_VISION, image_token_index=tokenizer.token_to_id("<image>"),
            pad_token_id=tokenizer.token_to_id("<|end_of_text|>"),
        )  # fmt: skip
    whole = seeded(lambda: transformers.LlavaForConditionalGeneration(config), 3)
    # as small as these are, states of all images would be as good as one
    for value in whole.model.vision_tower.state_dict().values():
        if value.dim() > 1:
            value.mul_(4.0)
    whole.model.language_model.load_state_dict(text.state_dict())
    return whole


def vision_file() -> File:
    """The part that sees, as its own file has it."""
    state: dict[str, Tensor] = llava().state_dict()
    tower = {
        "vision_model." + key.removeprefix("model.vision_tower.").removeprefix("vision_model."): value
        for key, value in state.items()
        if key.startswith("model.vision_tower.")
    }
    start = "model.multi_modal_projector."
    projector = {key.removeprefix("model."): value for key, value in state.items() if key.startswith(start)}
    return {**tower, **projector}


@dataclass(frozen=True, eq=False)
class TinySeeing(TinyFamily):
    """The family whose file has that part too."""

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        """The whole file."""
        seen = prefixed("vision_encoder.", vision_file())
        return TinyFamily.file(self, left_out) | {key: value.contiguous().clone() for key, value in seen.items()}


def _model() -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=33, out_channels=16, num_attention_heads=2, attention_head_dim=32, num_layers=2,
        num_single_layers=2, num_refiner_layers=2, text_embed_dim=WIDTH, pooled_projection_dim=WIDTH,
        rope_axes_dim=(4, 14, 14), guidance_embeds=False, image_condition_type="latent_concat",
    )  # fmt: skip


LEADING_CELL = TinySeeing(
    "hunyuan_video_i2v",
    _model,
    video_published.hunyuan,
    {"clip_l": CLIP_L, "llama3_8b": (lambda: texts.llama(words=words("llama3"), layers=4), texts.under("model."))},
    FAMILIES["hunyuan_video"].vae,
    lambda state: partial(published.ldm, dimensions=3)(louder(state)),
)
