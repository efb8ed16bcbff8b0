"""Facts about text encoders and latents that no tensor tells. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.core.sampling_facts import AudioFacts

#: what CLIP fills a text up with: the end token as OpenAI trained it, 0 as open_clip does
CLIP_END_ID, OPEN_CLIP_PAD_ID = 49407, 0


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """What the numbers of a latent mean.

    channels        channels of a latent
    downscale       pixels along one side of one latent cell
    scaling_factor  the diffusion model's latents are this many times the VAE's, less `shift`
    shift           what is taken off the VAE's latents before they are scaled
    means, deviations  of each channel of the VAE's latents, which the diffusion model has at 0 and 1 before they are
                    scaled; empty where it has them as they are
    vae             the kind of VAE, a name of `pool.detection.vaes`; kinds whose own tensors say what
                    their latents mean do so in `pool.models.vae.codec`
    dimensions      of a latent beside channels: 2 for images, 3 for video, 1 for audio
    audio           how long latents of audio are, and what they become; None for others
    frames_per_cell frames that one cell stands for; the first cell of a video is one frame
    cells           along one side, that `downscale` pixels stand for where one cell is no whole number of them
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

    def sides(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of the latent of an image of this many pixels."""
        return height * self.cells // self.downscale, width * self.cells // self.downscale


@dataclass(frozen=True, slots=True)
class TextFacts:
    """How a text encoder is read.

    layers_left_out  of the last layers: 0 reads the last one
    final_norm       what is read goes through the final norm
    pad_id           the token that a text is filled up with
    gives_pooled     the diffusion model is told its pooled text too
    encoder          its name (`pool.detection.text_encoders`) where its family's `text_set` says how it
                     is read; the other fields are not looked at then
    """

    layers_left_out: int = 0
    final_norm: bool = True
    pad_id: int = CLIP_END_ID
    gives_pooled: bool = False
    encoder: str = ""


#: a text encoder without anything out of the way: SD1's
PLAIN_TEXT = TextFacts()
