"""OmniGen 2: a flow that reads a text and up to five reference images, as tokens of one sequence. Torch-free.

The architecture is Lumina 2's with a part for reference images; diffusers has no class for it. The negative prompt is
read with the reference images, and once more without any: each has a scale of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import OMNIGEN_2
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import references
from modelpool.pool.files.formats.folder_header import WORDS_AND_IMAGES

if TYPE_CHECKING:
    from torch import Tensor, nn

_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant that generates high-quality images based on user instructions."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
)
#: most tokens of a text, with the template
_TOKENS = 1024
#: most pixels of a reference image, and along a side of it
_MOST_PIXELS, _MOST_SIDE = 1024**2, 2048
#: what the script of its authors avoids; brackets are a part of the text
_NEGATIVE = (
    r"\(\(\(deformed\)\)\), blurry, over saturation, bad anatomy, disfigured, poorly drawn face, mutation, mutated, "
    r"\(extra_limb\), \(ugly\), \(poorly drawn hands\), fused fingers, messy drawing, broken legs censor, censored, "
    "censor_bar"
)
#: of the embedding of the noise level, and the words that its class has positions for; no shape determines them
_LEVEL_SCALE, _LENGTHS = 1000.0, (1024, 1664, 1664)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `OmniGen2Transformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden = sizes["hidden_size"]
    return sizes | {
        "out_channels": sizes["out_channels"],
        "multiple_of": 1,
        "ffn_dim_multiplier": fam.ratio(shapes["layers.0.feed_forward.linear_1.weight"][0], 4 * hidden),
        "axes_dim_rope": (hidden // sizes["num_attention_heads"] // 3,) * 3,
        "axes_lens": _LENGTHS,
        "timestep_scale": _LEVEL_SCALE,
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Time and output of the module run from noise to image."""
    return -fam.sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=1 - level_B,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=kwargs.get("context_mask"),
            references=references(kwargs),
        )
    )


FAMILIES = (
    fam.Family(
        name="omnigen2",
        title="OmniGen 2",
        detect=fam.Detection(OMNIGEN_2, fam.anything, "Omnigen2"),
        build=fam.ModelBuild(
            "OmniGen2Transformer2DModel",
            config,
            fam.unchanged(),
            forward,
            dtypes=fam.HALF_FIRST,
            optional_inputs=frozenset({"context_mask", "reference"}),
            lengths=frozenset({"axes_lens"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen25_3b",
                    2048,
                    _TEMPLATE,
                    most_tokens=_TOKENS,
                    is_masked=True,
                    padding=fam.Padding.DROPPED,
                ),
            )
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            # the root of the cells of the latent, a fortieth of it
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ShiftByRoot(400, 0.0, 1.0)),
            reads=frozenset({"context", "context_mask", "reference"}),
            side_multiple=16,
            several_references=True,
            reference_side=_MOST_SIDE,
            reference_pixels=_MOST_PIXELS,
            defaults=fam.SamplingDefaults(
                steps=50,
                cfg=5.0,
                sampler="euler",
                schedule="simple",
                guidance=fam.Guidance.TEXT_AND_IMAGE,
                image_cfg=2.0,
                negative=_NEGATIVE,
            ),
            sequence=sequence_plans.OMNIGEN_2,
        ),
        sources="pipeline_omnigen2.py and inference.py of VectorSpaceLab/OmniGen2; ComfyUI has a shift of 2.6 at every "
        "size",
        # its pipeline and its class are no part of diffusers
        folder=fam.DiffusersFolder("", text_folders={fam.Role.TEXT_ENCODER: WORDS_AND_IMAGES}),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(
            # teacache_util.py and transformer_omnigen2.py of its authors
            teacache=(fam.TeaCacheFacts((-5.48259225, 11.48772289, -4.47407401, 2.47730926, -0.03316487), 0.05),),
            skips_blocks=True,
        ),
    ),
)
