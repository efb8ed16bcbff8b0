"""Facts about text encoders and latents that cannot be derived from tensors. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelpool.pool.values.core.sampling_facts import AudioFacts, SoundFacts

#: padding tokens of CLIP: the end token in OpenAI's models, 0 in open_clip
CLIP_END_ID, OPEN_CLIP_PAD_ID = 49407, 0
#: sides of outputs are multiples of this
_SIDE_STEP = 8


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """Layout and scale of latents.

    channels        channels of a latent
    downscale       pixels along one side of one latent cell
    scaling_factor  latents of the diffusion model are the VAE's latents minus `shift`, times this
    shift           subtracted from the VAE's latents before scaling
    means, deviations  of each channel of the VAE's latents, normalised before scaling; empty for no normalisation
    vae             the kind of VAE, a name of `pool.families.detection.vaes`; kinds with tensors that contain these
                    statistics read them in `pool.models.components.vae.codec`
    dimensions      of a latent besides channels: 2 for images, 3 for video, 1 for audio
    audio           length and format of audio; None for others
    frames_per_cell frames of one temporal cell; the first cell of a video is one frame
    cells           cells along one side of `downscale` pixels, if one cell is not a whole number of pixels
    sound           latent of the audio track of a video; None if it has none
    encoded_side    pixels along one side of a cell for the encoder, if an image is scaled before; 0: as `downscale`
    """

    channels: int
    downscale: int
    scaling_factor: float
    shift: float = 0.0
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    vae: str = "kl"
    dimensions: int = 2
    frames_per_cell: int = 1
    audio: AudioFacts | None = None
    cells: int = 1
    sound: SoundFacts | None = None
    encoded_side: int = 0

    @property
    def of_encoder(self) -> LatentFacts:
        """The latents as their encoder makes them of pixels."""
        return self if not self.encoded_side else replace(self, downscale=self.encoded_side, cells=1, encoded_side=0)

    def pixels_of(self, cells: int) -> int:
        """Return the shortest side of an output, a multiple of 8 pixels, with so many cells."""
        return -(-cells * self.downscale // (self.cells * _SIDE_STEP)) * _SIDE_STEP

    def sides(self, width: int, height: int) -> tuple[int, int]:
        """Return height and width of the latent of an image of this size in pixels."""
        return height * self.cells // self.downscale, width * self.cells // self.downscale


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The settings for reading the states of a text encoder.

    layers_left_out  last layers to skip; 0 reads the last one
    final_norm       the final norm is applied
    pad_id           padding token
    gives_pooled     the diffusion model also reads its pooled output
    encoder          its name (`pool.families.detection.text_encoders`) if the `text_set` of its family specifies the
                     reading; the other fields are then ignored
    """

    layers_left_out: int = 0
    final_norm: bool = True
    pad_id: int = CLIP_END_ID
    gives_pooled: bool = False
    encoder: str = ""


#: defaults of a plain text encoder: SD1
PLAIN_TEXT = TextFacts()
