"""GLM-Image: one stream of glyphs and patches, after tokens of the image that a language model writes. Torch-free.

The language model reads the prompt and writes a token for each 32 x 32 pixels; the diffusion model reads these, and the
parts of the prompt in quotation marks, which it is to draw. Reference images are read as keys and values of the
diffusion model, with their own tokens. No single file of the original code has been published: files have the names of
diffusers.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.definitions import cogview4
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import output_size
from modelpool.pool.families.parts.written_image import REFERENCE_TOKEN
from modelpool.pool.files.formats.folder_header import WRITER_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

LAYOUT = fam.Layout(
    "GLM-Image",
    (
        fam.diffusers(
            "glyph_projector.net.0.proj.weight",
            "prior_token_embedding.weight",
            measure=fam.sizes(
                in_channels=fam.dim("image_projector.proj.weight", 1, divide=fam.PATCH),
                hidden_size=fam.dim("image_projector.proj.weight", 0),
                depth=fam.count("transformer_blocks."),
                context_dim=fam.dim("glyph_projector.net.0.proj.weight", 1),
                codes=fam.dim("prior_token_embedding.weight", 0),
            ),
        ),
    ),
)
#: width of a head; one that is narrower is the only one. Source: transformer/config.json of zai-org/GLM-Image
_HEAD = 128
_PATCH_SIDE = 2
#: a size, and a crop, that the model reads; each is two numbers
_CONDITIONS = 4
#: most tokens of a glyph text
_GLYPHS = 2048


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.GlmImageTransformer2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden = measured["hidden_size"]
    head = min(_HEAD, hidden)
    return {
        "patch_size": _PATCH_SIDE,
        "in_channels": measured["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // fam.PATCH,
        "num_layers": measured["depth"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "text_embed_dim": measured["context_dim"],
        "time_embed_dim": shapes["time_condition_embed.timestep_embedder.linear_1.weight"][0],
        "condition_dim": shapes["time_condition_embed.condition_embedder.linear_1.weight"][1] // _CONDITIONS,
        "prior_vq_quantizer_codebook_size": measured["codes"],
    }


def join(read: Sequence[fam.ReadText]) -> fam.Joined:
    """The states of glyphs, and the tokens of the image and of the reference images."""
    glyphs, writer = read
    return {"context": glyphs.context_LD, "prior_tokens": writer.tokens_N, "reference_tokens": writer.seen_N}


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Without tokens, as for negative prompts, their embeddings are zeros, and no reference
    images are read."""
    import torch

    tokens_BN, size_B2 = kwargs.get("prior_tokens"), output_size(x_BCHW, kwargs)
    # tokens have no part in dry runs, reference images have
    reads_references = "reference" in kwargs and (tokens_BN is not None or x_BCHW.is_meta)
    return fam.sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=kwargs["context"],
            prior_token_id=_no_tokens(x_BCHW) if tokens_BN is None else tokens_BN,
            # for all of them: a mask would be read from the device
            prior_token_drop=tokens_BN is None,
            timestep=cogview4.timestep_before_shift(x_BCHW, level_B) - 1.0,
            target_size=size_B2,
            crop_coords=torch.zeros_like(size_B2),
            kv_caches=_references_read(module, kwargs) if reads_references else None,
            return_dict=False,
        )
    )


def _no_tokens(x_BCHW: Tensor) -> Tensor:
    """Return tokens without a meaning for the patches of latents, [B,N]."""
    import torch

    patches = x_BCHW.shape[-2] * x_BCHW.shape[-1] // fam.PATCH
    return torch.zeros((len(x_BCHW), patches), dtype=torch.long, device=x_BCHW.device)


def _references(kwargs: fam.ModelKwargs) -> list[str]:
    """Return the names of the latents of reference images, in order."""
    later = (f"reference_{number}" for number in range(2, len(kwargs) + 2))
    return ["reference", *takewhile(kwargs.__contains__, later)]


def _references_read(module: nn.Module, kwargs: fam.ModelKwargs) -> Any:
    """Return the keys and values of the reference images of each latent, which `module` reads one after the other,
    clean and without a text."""
    import torch
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    images = [kwargs[name] for name in _references(kwargs)]
    context, tokens_BN = kwargs["context"], kwargs.get("reference_tokens")
    caches = GlmImageKVCache(num_layers=fam.config_of(module).num_layers)
    caches.set_mode("write")
    for row in range(len(context)):
        start = 0
        for image_BCHW in images:
            image_1CHW = image_BCHW[row : row + 1]
            tokens_1N = _no_tokens(image_1CHW)
            if tokens_BN is not None:
                tokens_1N = tokens_BN[row : row + 1, start : start + tokens_1N.shape[1]]
            start += tokens_1N.shape[1]
            size_12 = output_size(image_1CHW, {})
            module(
                hidden_states=image_1CHW,
                encoder_hidden_states=context[row : row + 1, :0],
                prior_token_id=tokens_1N,
                prior_token_drop=False,
                timestep=torch.zeros_like(size_12[:, 0]),
                target_size=size_12,
                crop_coords=torch.zeros_like(size_12),
                kv_caches=caches,
                return_dict=False,
            )
        caches.next_sample()
    caches.set_mode("read")
    return caches


FAMILIES = (
    fam.Family(
        name="glm_image",
        title="GLM-Image",
        detect=fam.Detection(LAYOUT, fam.anything, ""),
        build=fam.ModelBuild(
            "GlmImageTransformer2DModel",
            config,
            fam.unchanged(),
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"prior_tokens", "size", "reference", "reference_tokens"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "byt5_small_glyph",
                    1472,
                    most_tokens=_GLYPHS,
                    is_masked=True,
                    padding=fam.Padding.DROPPED,
                    quotes_apart=True,
                ),
                fam.Reading("glm_image_9b", image_token=REFERENCE_TOKEN, reads_states=False, writes_tokens=True),
            ),
            join=fam.TextJoin(join),
            vision=fam.TextVision(
                {fam.ReferenceMode.WHOLE: "GlmImagePipeline"},
                {},
                part=fam.VisionPart.GLM_IMAGE,
                role=fam.Role.TEXT_ENCODER_2,
            ),
        ),
        latent="glm_image",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=cogview4.SHIFT),
            reads=frozenset({"context", "prior_tokens", "size", "reference_tokens"}),
            side_multiple=32,
            patch_side=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=1.5, sampler="euler", schedule="linspace_open", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.COGVIEW4,
        ),
        sources="diffusers' GlmImagePipeline; zai-org/GLM-Image",
        folder=fam.DiffusersFolder(
            "GlmImagePipeline",
            scales_latent=False,
            text_folders={fam.Role.TEXT_ENCODER: fam.Role.TEXT_ENCODER.value, fam.Role.TEXT_ENCODER_2: WRITER_FOLDER},
            scheduler=cogview4.SCHEDULER,
        ),
        lora=fam.TRANSFORMER,
    ),
)
