"""Supports checkpoints with only some components of their family: most published transformer files are only the
diffusion model. Torch-free.

They are saved, merged and converted as they are, but not run: that needs a complete model
(`pool.models.loading.assembled_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from modelpool.pool.families.detection.vaes import FACTS, VaeFacts
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.models.components.common.infer_config import latents_with
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role


def without_parts(family: LocatedFamily, missing: Collection[Role]) -> LocatedFamily:
    """Return `family` without the components `missing`. Without its VAE, latents are the published VAE's."""
    kept = {role: prefix for role, prefix in family.prefixes.items() if role not in missing}
    texts = {role: facts for role, facts in family.texts.items() if role in kept}
    latent = family.latent if Role.VAE in kept else family.latent or _published_latent(family)
    return replace(family, prefixes=kept, texts=texts, latent=latent)


def _published_latent(family: LocatedFamily) -> LatentFacts:
    row = LATENT_FORMATS[family.latent_format]
    plain = VaeFacts("kl", family.title, row.channels)
    vae = next((facts for facts in FACTS.values() if family.latent_format in facts.latent_formats), plain)
    return latents_with(family, replace(vae, latent_channels=row.channels, dimensions=row.dimensions))
