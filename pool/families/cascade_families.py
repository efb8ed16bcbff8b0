"""The stages of Stable Cascade, as families: stage C is the prior, stage B the decoder. Torch-free.

Two models generate an image, each published as a checkpoint or a diffusers folder: stage C generates a small latent
from a text, stage B an image latent from that, which the VAE ("stage A") decodes. Stage C has a text encoder and no
VAE, stage B a VAE and no text encoder: it reads the pooled text of stage C. Further parts of their files are not run:
an image encoder and a previewer in place of stage C's VAE, and copies of stage C's text encoders with stage B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.family_facts import LatentFacts, TextFacts
from modelpool.pool.core.sampling_facts import SamplingDefaults, SamplingFacts
from modelpool.pool.detection.latent_formats import LATENT_FORMATS
from modelpool.pool.detection.signatures import SIGNATURES
from modelpool.pool.families.cascade_facts import CASCADE_FACTS
from modelpool.pool.families.family import Architecture, Family
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role

_MODEL_PREFIX = "model.diffusion_model."
#: key prefix of its text encoder. Source: the names under which ComfyUI writes and reads CLIP-G there
_TEXT_PREFIX, _VAE_PREFIX = "text_encoder.clip_g.", "vae."
_TEXT_ENCODER = "clip_g"
#: Pixels per this number of cells of stage C's latent. Source: `resolution_multiple` of diffusers'
#: StableCascadePriorPipeline
_PIXELS, _CELLS = 128, 3
_STAGES_B = ("cascade_b", "cascade_b_lite")
#: Both draw new noise in each step, as DDPM does; steps are spaced evenly on the cosine schedule. Source:
#: DDPMWuerstchenScheduler of diffusers
_SAMPLER, _SCHEDULE = "euler_ancestral", "simple"
#: weight that reads the pooled text, in the naming of diffusers and of the published stage B
_POOLED = ("clip_txt_pooled_mapper.weight", "clip_mapper.weight")
#: a tensor of stage B whose width is the channel count of stage C's latent
_READS_PRIOR = ("effnet_mapper.0.weight", 1)


def _family(name: str) -> Family:
    facts, row = CASCADE_FACTS[name], next(row for row in SIGNATURES if row.name == name)
    is_b, latent = name in _STAGES_B, LATENT_FORMATS[row.latent]
    text, vae = {Role.TEXT_ENCODER: _TEXT_PREFIX}, {Role.VAE: _VAE_PREFIX}
    return Family(
        name=name,
        title=row.title,
        prefixes={**({} if is_b else text), Role.DIFFUSION_MODEL: _MODEL_PREFIX, **(vae if is_b else {})},
        architectures={
            Role.DIFFUSION_MODEL: Architecture.DIFFUSION_TRANSFORMER,
            **({Role.VAE: Architecture.VAE} if is_b else {Role.TEXT_ENCODER: Architecture.TEXT_MODEL}),
        },
        texts={} if is_b else {Role.TEXT_ENCODER: TextFacts(encoder=_TEXT_ENCODER)},
        native_pixels=facts.width,
        scaling_factor=latent.scale,
        sampling=SamplingFacts(
            prediction=facts.prediction,
            noise=facts.noise,
            model=name,
            reads=frozenset((*facts.reads, *facts.may_read)),
            side_multiple=facts.side_multiple,
            defaults=SamplingDefaults(facts.steps, facts.cfg, _SAMPLER, _SCHEDULE, facts.guidance),
            decoders=() if is_b else _STAGES_B,
        ),
        text_set="" if is_b else name,
        latent_format=row.latent,
        # Source: the supported dtypes of ComfyUI's classes
        dtypes=("float16", "bfloat16", "float32") if is_b else ("bfloat16", "float32"),
        relative="cascade",
        latent=None if is_b else LatentFacts(latent.channels, _PIXELS, latent.scale, cells=_CELLS, vae=""),
    )


#: by the name that recognition returns
CASCADES: Mapping[str, Family] = MappingProxyType({name: _family(name) for name in CASCADE_FACTS})


def with_text_encoder(family: Family, keys: Iterable[str]) -> Family:
    """Return `family` with the text encoder that some files and folders of stage B carry, if it is among `keys`; other
    families unchanged."""
    if not family.sampling.is_decoder_stage:
        return family
    stage_c = CASCADES["cascade_c"]
    prefix = f"{Role.TEXT_ENCODER.value}." if family.configs else _TEXT_PREFIX
    if not any(key.startswith(prefix) for key in keys):
        return family
    return replace(
        family,
        prefixes={Role.TEXT_ENCODER: prefix, **family.prefixes},
        architectures={Role.TEXT_ENCODER: Architecture.TEXT_MODEL, **family.architectures},
        texts=stage_c.texts,
        text_set=stage_c.text_set,
    )


def prior_cells(width: int, height: int) -> tuple[int, int]:
    """Return height and width of stage C's latent for an image of this many pixels."""
    return height * _CELLS // _PIXELS, width * _CELLS // _PIXELS


def pooled_width(bare: Mapping[str, Shape]) -> int | None:
    """Return the width of the pooled text that a stage reads, by the shapes `bare` of its diffusion model (keys without
    prefix); None if no tensor tells."""
    return next((bare[key][1] for key in _POOLED if len(bare.get(key, ())) == 2), None)


def check_stage(family: Family, bare: Mapping[str, Shape]) -> None:
    """Check that stage B, with tensors of the shapes `bare` (keys without prefix), reads latents of stage C; other
    families pass. Raises UnknownArchitecture."""
    key, dimension = _READS_PRIOR
    if not family.sampling.is_decoder_stage or len(bare.get(key, ())) <= dimension:
        return
    expected = LATENT_FORMATS["cascade_c"].channels
    if bare[key][dimension] != expected:
        found = bare[key][dimension]
        raise UnknownArchitecture(f"it reads latents of {found} channels, expected the {expected} of stage C")
