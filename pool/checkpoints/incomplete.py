"""Checkpoints that have some components of their family and not the others: most published files of transformers are
the diffusion model alone. Torch-free.

They are saved, merged and converted as they are, and do not run: that takes the whole (`pool.checkpoints.assembled`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pool.checkpoints.families import Family
from pool.checkpoints.infer import latents_with
from pool.checkpoints.recognition.latent_formats import LATENT_FORMATS
from pool.checkpoints.recognition.vae_facts import VaeFacts
from pool.checkpoints.recognition.vaes import FACTS
from pool.family_facts import LatentFacts
from pool.spec import Role


def without_parts(family: Family, missing: Collection[Role]) -> Family:
    """`family` without the components `missing`. Without its VAE, latents are those of the published one."""
    kept = {role: prefix for role, prefix in family.prefixes.items() if role not in missing}
    texts = {role: facts for role, facts in family.texts.items() if role in kept}
    latent = family.latent if Role.VAE in kept else family.latent or _published_latent(family)
    return replace(family, prefixes=kept, texts=texts, latent=latent)


def _published_latent(family: Family) -> LatentFacts:
    row = LATENT_FORMATS[family.latent_format]
    plain = VaeFacts("kl", family.title, row.channels)
    vae = next((facts for facts in FACTS.values() if family.latent_format in facts.latent_formats), plain)
    return latents_with(family, replace(vae, latent_channels=row.channels, dimensions=row.dimensions))
