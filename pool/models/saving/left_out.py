"""Finds tensors of a checkpoint that no component takes: they are not saved when a file becomes a diffusers folder, or
a folder a file, though users may need them.

Tensors left out by design are not reported: averages of training, noise schedules and markers (the scheduler's
configuration contains them), tables that modules compute, counters and losses of training, tokenizers as bytes, heads
and projections that no pipeline reads, and the extra tensors of quantized weights.
"""

from __future__ import annotations

from collections.abc import Collection

from modelpool.pool.models.components.common.extra_tensors import is_known_leftover
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.saving.single_file import EMA_PREFIX
from modelpool.pool.values.specs.spec import Role

#: parts of autoencoder files that only training needs
_OF_VAE = ("loss.", EMA_PREFIX)


def left_out(checkpoint: Checkpoint, reported: Collection[Role]) -> tuple[str, ...]:
    """Return the keys of the tensors of `checkpoint` that no component has, in file order; tensors of the components
    `reported` are reported elsewhere."""
    family, shapes = checkpoint.family, checkpoint.shapes
    taken = {key for role in reported for key in family.shapes_of(role, shapes)}
    for role in family.prefixes:
        if role not in reported:
            key_map = checkpoint.key_map(role)
            taken |= key_map.sources.keys() - set(key_map.unused)
    return tuple(key for key in shapes if key not in taken and not _is_omitted_by_design(checkpoint, key))


def _is_omitted_by_design(checkpoint: Checkpoint, key: str) -> bool:
    vae = checkpoint.family.prefixes.get(Role.VAE, "")
    of_vae = bool(vae) and key.startswith(tuple(vae + part for part in _OF_VAE))
    return is_known_leftover(key) or of_vae or key.startswith(EMA_PREFIX)
