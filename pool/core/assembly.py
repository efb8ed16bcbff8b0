"""Value types of a model made of separate files. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from modelpool.pool.core.errors import CorruptFile

#: more text encoders than any family reads
MOST_TEXT_ENCODERS = 8


@dataclass(frozen=True, slots=True)
class Assembly:
    """The files of one model. Paths are absolute; "" is a file that is not given.

    path             what the whole is called: the description, or a name for what a configuration says
    checkpoint       a whole checkpoint, whose components are used where no other file is given
    diffusion_model  the file to take the diffusion model of
    vae              the file to take the VAE of
    text_encoders    files to take text encoders of; which each of them is, it says itself
    vision_encoder   the file to take the vision encoder of, for models that see an image
    low_noise        the file to take a second diffusion model of, which makes the steps of low noise: the published
                     models of 14B of Wan 2.2 are two
    """

    path: str
    checkpoint: str = ""
    diffusion_model: str = ""
    vae: str = ""
    text_encoders: tuple[str, ...] = ()
    vision_encoder: str = ""
    low_noise: str = ""

    def __post_init__(self) -> None:
        if not (self.checkpoint or self.diffusion_model):
            raise CorruptFile(f"{self.path}: names no diffusion_model, expected one, or a checkpoint that has one")
        if len(self.text_encoders) > MOST_TEXT_ENCODERS:
            raise CorruptFile(
                f"{self.path}: names {len(self.text_encoders)} text encoders, expected at most {MOST_TEXT_ENCODERS}"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """Every file, each once: the checkpoint first, then the diffusion models, the VAE and the encoders."""
        return tuple(dict.fromkeys(file for _, file in self.parts))

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """What each file is for (a key of a description), and the file."""
        models = (("diffusion_model", self.diffusion_model), ("low_noise", self.low_noise))
        single = (("checkpoint", self.checkpoint), *models, ("vae", self.vae), ("vision_encoder", self.vision_encoder))
        every = (*single, *(("text_encoders", file) for file in self.text_encoders))
        return tuple((key, file) for key, file in every if file)


#: where weights are: the path of a file, of an index or of a folder, or files that make a model together
Source: TypeAlias = str | os.PathLike[str] | Assembly
