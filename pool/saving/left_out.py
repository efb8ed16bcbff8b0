"""Finds tensors of a checkpoint that no component takes: they are not saved when a file becomes a diffusers folder, or
a folder a file, though users may need them.

Not reported are those left out by design: averages of training, noise schedules and markers (the scheduler's
configuration contains them), tables that modules compute, counters and losses of training, tokenizers as bytes, heads
and projections that no pipeline reads, and the extra tensors of quantized weights.
"""

from __future__ import annotations

from collections.abc import Collection

from modelpool.pool.loading.build_checkpoint import Checkpoint
from modelpool.pool.saving.single_file import EMA_PREFIX
from modelpool.pool.specs.spec import Role
from modelpool.pool.text.tokenizer_files import TENSORS

#: buffers of the training noise schedule, as LDM's and Stability's code register them
_SCHEDULES = frozenset({
    "betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod",
    "log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "posterior_variance",
    "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "logvar", "lvlb_weights",
    "scale_factor", "denoiser.sigmas",
})  # fmt: skip
#: trainers' markers of the prediction and of latents
_MARKS = frozenset({"v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred.sigma_min", "edm_vpred.sigma_max"})
#: key suffixes: tables, training counters, a training temperature, tokenizers, heads, an alias of a table
_ENDS = (
    ".position_ids", ".token_type_ids", ".inv_freq", "attn_mask", ".num_batches_tracked", "logit_scale",
    "text_projection", "text_projection.weight", "lm_head.weight", "lm_head.bias", "rope_freqs.weight",
    "encoder.embed_tokens.weight", "_extra_state", *TENSORS,
)  # fmt: skip
#: the same for single models, which their code computes or never reads: PixArt's table and the embedding of an empty
#: text, the last norm of Lumina 2 and Z-Image, Cosmos' tables and counters, latent statistics of configurations
_OF_MODELS = (
    "pos_embed", "y_embedder.y_embedding", "norm_final.weight", ".wavelets", "vae.latent_mean", "vae.latent_std",
    "pos_embedder.seq", "pos_embedder.dim_spatial_range", "pos_embedder.dim_temporal_range",
    "accum_video_sample_counter", "accum_image_sample_counter", "accum_iteration", "accum_train_in_hours",
    "logvar.0.freqs", "logvar.0.phases", "logvar.1.weight", "per_channel_statistics.channel",
    "per_channel_statistics.mean-of-stds", "per_channel_statistics.mean-of-stds_over_std-of-means",
)  # fmt: skip
#: parts of autoencoder files that only training needs
_OF_VAE = ("loss.", EMA_PREFIX)


def left_out(checkpoint: Checkpoint, reported: Collection[Role]) -> tuple[str, ...]:
    """Return the keys of the tensors of `checkpoint` that no component has, in file order; those of the components
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
    is_known = key in _SCHEDULES or key in _MARKS or key.endswith((*_ENDS, *_OF_MODELS))
    return is_known or of_vae or key.startswith(EMA_PREFIX)
