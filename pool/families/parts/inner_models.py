"""Models that are part of a diffusion model here and have a folder of their own in diffusers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.files.formats.folder_header import (
    CONDITION_ENCODER,
    DURATION_FOLDER,
    PROJECTION,
    UNCONDITIONAL_FOLDER,
)

#: names in the module of a diffusion model: the model that embeds start and length of audio, or the length alone
SECONDS, DURATION = "seconds", "duration"
#: a second diffusion model, which predicts without a text
UNCONDITIONAL = "unconditional"
#: the condition encoder of music, also its folder; its arguments begin with the same word
COMPANION = "condition_encoder"
#: its parameter: the latent of silence, [1,L,C]. Published files have it in a file of its own
SILENCE = "silence_latent"
#: cells of the published latent of silence; cells that stand for a reference audio: 30 s
SILENCE_CELLS, TIMBRE_CELLS = 15000, 750
#: the state of text padding in published files of models with `DURATION`
PADDING_KEY = "conditioner.conditioners.prompt.padding_embedding"

#: folder of each, by its name in the module
INNER_FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        SECONDS: PROJECTION,
        DURATION: DURATION_FOLDER,
        UNCONDITIONAL: UNCONDITIONAL_FOLDER,
        COMPANION: CONDITION_ENCODER,
    }
)
