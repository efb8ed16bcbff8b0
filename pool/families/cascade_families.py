"""Stable Cascade's stages, as families. Torch-free.

An image is made by two models, each published as a checkpoint or a folder of diffusers: stage C makes a small latent
of a text, stage B an image's latent of that, which the VAE beside it ("stage A") decodes. So stage C has a text
encoder and no VAE, stage B a VAE and no text encoder: it is told the text as stage C read it. Their files carry more,
which nothing here runs: an encoder of images and a previewer in the place of stage C's VAE, and text encoders equal
to stage C's beside stage B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.family_facts import LatentFacts, TextFacts
from modelpool.pool.core.sampling_facts import SamplingFacts, UsualRun
from modelpool.pool.detection.latent_formats import LATENT_FORMATS
from modelpool.pool.detection.signatures import SIGNATURES
from modelpool.pool.families.cascade_facts import CASCADE_FACTS
from modelpool.pool.families.family import Architecture, Family
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.specs.spec import Role

_MODEL_PREFIX = "model.diffusion_model."
#: what the keys of its text encoder begin with. Source: the names under which ComfyUI writes and reads CLIP-G there
_TEXT_PREFIX, _VAE_PREFIX = "text_encoder.clip_g.", "vae."
_TEXT_ENCODER = "clip_g"
#: so many cells of stage C's latent are so many pixels wide.
#: Source: `resolution_multiple` of diffusers' StableCascadePriorPipeline
_PIXELS, _CELLS = 128, 3
_STAGES_B = ("cascade_b", "cascade_b_lite")
#: both draw new noise in each step, as DDPM does; steps are even along the way of the cosine.
#: Source: DDPMWuerstchenScheduler of diffusers
_SAMPLER, _SCHEDULE = "euler_ancestral", "simple"
#: what each stage takes a pooled text in by, as diffusers calls it and as stage B is published
_POOLED = ("clip_txt_pooled_mapper.weight", "clip_mapper.weight")
#: a tensor of stage B, as wide as what it reads of stage C
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
            usual=UsualRun(facts.steps, facts.cfg, _SAMPLER, _SCHEDULE, facts.guidance),
            decoders=() if is_b else _STAGES_B,
        ),
        text_set="" if is_b else name,
        latent_format=row.latent,
        # Source: the supported dtypes of ComfyUI's classes
        dtypes=("float16", "bfloat16", "float32") if is_b else ("bfloat16", "float32"),
        relative="cascade",
        latent=None if is_b else LatentFacts(latent.channels, _PIXELS, latent.scale, cells=_CELLS, vae=""),
    )


#: by the name that recognition gives
CASCADES: Mapping[str, Family] = MappingProxyType({name: _family(name) for name in CASCADE_FACTS})


def with_text_encoder(family: Family, keys: Iterable[str]) -> Family:
    """`family`, and with it the text encoder that files and folders of stage B carry for pipelines that read texts
    anew, where there is one among `keys`; other families as they are."""
    if not family.sampling.reads_prior:
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
    """Height and width of stage C's latent of an image of this many pixels."""
    return height * _CELLS // _PIXELS, width * _CELLS // _PIXELS


def pooled_width(bare: Mapping[str, Shape]) -> int | None:
    """How wide a pooled text the stage reads whose diffusion model has tensors of the shapes `bare` (keys without
    prefix); None where no tensor tells."""
    return next((bare[key][1] for key in _POOLED if len(bare.get(key, ())) == 2), None)


def check_stage(family: Family, bare: Mapping[str, Shape]) -> None:
    """Check that stage B, whose diffusion model has tensors of the shapes `bare` (keys without prefix), reads latents
    of stage C; nothing of other families. Raises UnknownArchitecture."""
    key, dimension = _READS_PRIOR
    if not family.sampling.reads_prior or len(bare.get(key, ())) <= dimension:
        return
    expected = LATENT_FORMATS["cascade_c"].channels
    if bare[key][dimension] != expected:
        found = bare[key][dimension]
        raise UnknownArchitecture(f"it reads latents of {found} channels, expected the {expected} of stage C")
