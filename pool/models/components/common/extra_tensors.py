"""Reports tensors that no parameter of a component uses, the same for every component of checkpoints, for ControlNets,
upscalers and image prompt adapters.

They change nothing, except a scale or zero point of 8-bit weights, which is refused. Not reported are those that
published files always carry: noise schedules and markers, tables that modules compute, training counters, tokenizers as
bytes, and heads that no pipeline reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from modelpool.pool.models.text.tokenizer_files import TENSORS
from modelpool.pool.weights.quant.open_weights import OpenWeights

_LOG = logging.getLogger(__name__)
#: tensors without a use that a message names
_MOST_NAMED = 5
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
#: key prefixes of the noise on image embeddings: its schedule, and statistics (`pool.models.loading.small_tensors`)
_OF_UNCLIP = ("noise_augmentor.", "image_normalizer.")
#: the same within names: the heads of BERT, and its pooled state
_WITHIN = ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.")


def is_known_leftover(key: str) -> bool:
    """Return whether `key` is a tensor of published files that no module reads by design."""
    return key in _SCHEDULES or key in _MARKS or key.startswith(_OF_UNCLIP) or key.endswith((*_ENDS, *_OF_MODELS))


def unexplained(unused: Iterable[str]) -> tuple[str, ...]:
    """Return the keys in `unused` that published files do not have."""
    return tuple(key for key in unused if not is_known_leftover(key) and not any(part in key for part in _WITHIN))


def check_extra_tensors(weights: OpenWeights, what: str, keys: Iterable[str]) -> None:
    """Log the names `keys` of the tensors of a file that no parameter of its component `what` uses, except those that
    published files always carry. Raises BadQuantization for a scale of 8-bit weights among them."""
    unused = unexplained(keys)
    weights.expect_scales_read(unused)
    if unused:
        first = ", ".join(unused[:_MOST_NAMED]) + (", ..." if len(unused) > _MOST_NAMED else "")
        words = "%s: its %s has no parameter for %d tensors, which are not used: %s"
        _LOG.warning(words, weights.header.path, what, len(unused), first)
