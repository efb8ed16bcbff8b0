"""Value types of a model assembled from separate files. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from modelpool.pool.values.core.errors import CorruptFile, counted

#: maximum number of text encoders; more than any family reads
MOST_TEXT_ENCODERS = 8


@dataclass(frozen=True, slots=True)
class Assembly:
    """The files of one model. Paths are absolute; "" means no file.

    path             name of the model: the description file, or a name for a configuration
    checkpoint       a complete checkpoint: its components are used unless another file is set
    diffusion_model  file of the diffusion model
    vae              file of the VAE
    text_encoders    files of text encoders; the kind of each is detected
    vision_encoder   file of the vision encoder, for models that read images
    low_noise        file of the low-noise expert; the published 14B models of Wan 2.2 have two experts
    unconditional    file of the model that predicts without a text, for models that are guided by one (Ideogram 4)
    """

    path: str
    checkpoint: str = ""
    diffusion_model: str = ""
    vae: str = ""
    text_encoders: tuple[str, ...] = ()
    vision_encoder: str = ""
    low_noise: str = ""
    unconditional: str = ""

    def __post_init__(self) -> None:
        if not (self.checkpoint or self.diffusion_model):
            raise CorruptFile(f"{self.path}: names no diffusion_model, expected one, or a checkpoint that has one")
        if len(self.text_encoders) > MOST_TEXT_ENCODERS:
            raise CorruptFile(
                f"{self.path}: names {counted(len(self.text_encoders), 'text encoder')}, "
                f"expected at most {MOST_TEXT_ENCODERS}"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """Every file once: the checkpoint, the diffusion models, the VAE, the encoders."""
        return tuple(dict.fromkeys(file for _, file in self.parts))

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a key of the description and its file."""
        second = (("low_noise", self.low_noise), ("unconditional", self.unconditional))
        models = (("diffusion_model", self.diffusion_model), *second)
        single = (("checkpoint", self.checkpoint), *models, ("vae", self.vae), ("vision_encoder", self.vision_encoder))
        every = (*single, *(("text_encoders", file) for file in self.text_encoders))
        return tuple((key, file) for key, file in every if file)


#: source of weights: the path of a file, an index or a folder, or an assembly of files
Source: TypeAlias = str | os.PathLike[str] | Assembly
