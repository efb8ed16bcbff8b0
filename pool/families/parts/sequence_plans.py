"""How the models of several families divide their tokens among GPUs. Torch-free.

Tokens of the image or video are "image", those of the text "text". Plans follow the modules of diffusers: where a plan
of diffusers exists (`_cp_plan` of the class), it splits the same inputs.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.values.core.sequence_plan import Gather, SequencePlan, Split, SplitAttention

IMAGE, TEXT = ("image",), ("text",)
BOTH = ("text", "image")


def two_streams(
    *blocks: str, more: tuple[Split, ...] = (), ids: bool = False, gathered: str = "proj_out"
) -> SequencePlan:
    """Return the plan of a model whose blocks attend to text and image together, from the first one in `blocks` on.
    With `ids`, the inputs of the model are split, with the positions of their tokens; else those of the first block."""
    start = "" if ids else f"{blocks[0]}.0"
    splits = [Split(start, "hidden_states", 1, IMAGE), Split(start, "encoder_hidden_states", 1, TEXT)]
    if ids:
        splits += [Split("", "img_ids", 0, IMAGE, dims=2), Split("", "txt_ids", 0, TEXT, dims=2)]
    attention = tuple(SplitAttention(f"{name}.*.attn", BOTH, BOTH) for name in blocks)
    return SequencePlan((*splits, *more), (Gather(gathered, 1, "image"),), attention)


def controlled(plan: SequencePlan, segment: str, *names: str) -> SequencePlan:
    """Return `plan` for a model that also reads residuals of ControlNets, for the tokens of a segment, in the inputs of
    these names."""
    residuals = tuple(Split("", name, 1, (segment,)) for name in names)
    return replace(plan, splits=(*plan.splits, *residuals), reads_controls=True)


#: reference images are tokens behind those of the image, with positions of their own
FLUX_2 = replace(
    two_streams("transformer_blocks", "single_transformer_blocks", ids=True), reads_images=True, reads_references=True
)
FLUX = replace(
    controlled(FLUX_2, "image", "controlnet_block_samples", "controlnet_single_block_samples"), reads_prompts=True
)
_QWEN_IMAGE = two_streams(
    "transformer_blocks",
    more=(
        Split("transformer_blocks.*", "encoder_hidden_states_mask", 1, TEXT),
        Split("transformer_blocks.*", "modulate_index", 1, IMAGE),
        Split("transformer_blocks.*", "image_rotary_emb.0", 0, IMAGE),
        Split("transformer_blocks.*", "image_rotary_emb.1", 0, TEXT),
    ),
)
QWEN_IMAGE = replace(controlled(_QWEN_IMAGE, "image", "controlnet_block_samples"), reads_references=True)
WAN = SequencePlan(
    (
        Split("blocks.0", "hidden_states", 1, IMAGE),
        Split("blocks.*", "rotary_emb", 1, IMAGE),
        Split("blocks.*", "temb", 1, IMAGE, dims=4, whole=3),
    ),
    (Gather("blocks.-1", 1, "image"),),
    (SplitAttention("blocks.*.attn1", IMAGE, IMAGE),),
    reads_images=True,
)
LTX = SequencePlan(
    (
        Split("transformer_blocks.0", "hidden_states", 1, IMAGE),
        Split("transformer_blocks.*", "temb", 1, IMAGE),
        Split("transformer_blocks.*", "image_rotary_emb", 1, IMAGE),
    ),
    (Gather("transformer_blocks.-1", 1, "image"),),
    (SplitAttention("transformer_blocks.*.attn1", IMAGE, IMAGE),),
    reads_images=True,
)
#: its audio is complete on every member: few tokens, which read the video of all
LTX_2 = SequencePlan(
    (
        Split("transformer_blocks.0", "hidden_states", 1, IMAGE),
        *(Split("transformer_blocks.*", name, 1, IMAGE) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")),
        *(
            Split("transformer_blocks.*", name, dims - 2, IMAGE, dims=dims)
            for name in ("video_rotary_emb", "ca_video_rotary_emb")
            for dims in (3, 4)
        ),
    ),
    (Gather("transformer_blocks.-1", 1, "image"),),
    (
        SplitAttention("transformer_blocks.*.attn1", IMAGE, IMAGE),
        SplitAttention("transformer_blocks.*.video_to_audio_attn", (), IMAGE),
    ),
    reads_images=True,
)
#: words and patches are one sequence in its layers
_Z_IMAGE = SequencePlan(
    (
        Split("layers.0", "x", 1, ("tokens",)),
        Split("layers.*", "attn_mask", 1, ("tokens",)),
        Split("layers.*", "freqs_cis", 1, ("tokens",)),
    ),
    (Gather("layers.-1", 1, "tokens"),),
    (SplitAttention("layers.*.attention", ("tokens",), ("tokens",)),),
)
Z_IMAGE = controlled(_Z_IMAGE, "tokens", "controlnet_block_samples")
HUNYUAN_VIDEO_15 = two_streams(
    "transformer_blocks",
    more=(
        Split("transformer_blocks.*", "attention_mask", 1, TEXT),
        Split("transformer_blocks.*", "freqs_cis", 0, IMAGE),
    ),
)
HUNYUAN_VIDEO = two_streams(
    "transformer_blocks",
    "single_transformer_blocks",
    more=(
        Split("transformer_blocks.*", "attention_mask", 3, ("image", "text")),
        Split("transformer_blocks.*", "freqs_cis", 0, IMAGE),
        Split("single_transformer_blocks.*", "attention_mask", 3, ("image", "text")),
        Split("single_transformer_blocks.*", "image_rotary_emb", 0, IMAGE),
    ),
)
