"""How the models of several families divide their tokens among GPUs. Torch-free.

Tokens of the image or video are "image", tokens of the text "text". Plans follow the modules of diffusers: where a plan
of diffusers exists (`_cp_plan` of the class), it splits the same inputs.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.values.core.sequence_plan import Gather, SequencePlan, Split, SplitAttention, Undivided

IMAGE, TEXT = ("image",), ("text",)
BOTH = ("text", "image")
#: of words and patches in one sequence
TOKENS = ("tokens",)


def two_streams(
    *blocks: str,
    more: tuple[Split, ...] = (),
    ids: bool = False,
    gathered: str = "proj_out",
    attention: tuple[str, ...] = ("attn",),
    leaves_out: bool = False,
) -> SequencePlan:
    """Return the plan of a model with blocks that attend to text and image together, from the first one in `blocks` on.
    With `ids`, the inputs of the model are split, with the positions of their tokens; else those of the first block.
    `attention` are the modules in a block; the second one, if there is one, reads the image alone."""
    start = "" if ids else f"{blocks[0]}.0"
    splits = [Split(start, "hidden_states", 1, IMAGE), Split(start, "encoder_hidden_states", 1, TEXT)]
    if ids:
        splits += [Split("", "img_ids", 0, IMAGE, dims=2), Split("", "txt_ids", 0, TEXT, dims=2)]
    divided = [
        SplitAttention(f"{name}.*.{each}", read, read, leaves_out)
        for name in blocks
        for each, read in zip(attention, (BOTH, IMAGE), strict=False)
    ]
    gathers = (Gather(gathered, 1, "image"),)
    return SequencePlan((*splits, *more), gathers, tuple(divided))


def one_stream(
    blocks: str,
    *more: Split,
    hidden: str = "hidden_states",
    attention: str = "attn1",
    segment: str = "image",
    gathered: str = "",
) -> SequencePlan:
    """Return the plan of a model with blocks that pass on one sequence of tokens: the tokens of the image, which read
    the text in an attention of their own, or all in one `segment`."""
    tokens = (segment,)
    return SequencePlan(
        (Split(f"{blocks}.0", hidden, 1, tokens), *more),
        (Gather(gathered or f"{blocks}.-1", 1, segment),),
        (SplitAttention(f"{blocks}.*.{attention}", tokens, tokens),),
    )


def controlled(plan: SequencePlan, segment: str, *names: str) -> SequencePlan:
    """Return `plan` for a model that also reads residuals of ControlNets, for the tokens of a segment, in the inputs of
    these names."""
    residuals = tuple(Split("", name, 1, (segment,)) for name in names)
    return replace(plan, splits=(*plan.splits, *residuals), reads_controls=True)


#: of models with Flux's blocks
LIKE_FLUX = two_streams("transformer_blocks", "single_transformer_blocks", ids=True)
#: reference images are tokens behind the image's, with positions of their own
FLUX_2 = replace(LIKE_FLUX, reads_images=True, reads_references=True, takes_options=True)
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
QWEN_IMAGE = replace(
    controlled(_QWEN_IMAGE, "image", "controlnet_block_samples"), reads_references=True, takes_options=True
)
WAN = SequencePlan(
    (
        Split("blocks.0", "hidden_states", 1, IMAGE),
        Split("blocks.*", "rotary_emb", 1, IMAGE),
        Split("blocks.*", "temb", 1, IMAGE, dims=4, whole=3),
    ),
    (Gather("blocks.-1", 1, "image"),),
    (SplitAttention("blocks.*.attn1", IMAGE, IMAGE),),
    reads_images=True,
    follows_videos=True,
    takes_options=True,
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
    takes_options=True,
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
    takes_options=True,
)
#: words and patches are one sequence in its layers
_Z_IMAGE = SequencePlan(
    (
        Split("layers.0", "x", 1, TOKENS),
        Split("layers.*", "attn_mask", 1, TOKENS),
        Split("layers.*", "freqs_cis", 1, TOKENS),
    ),
    (Gather("layers.-1", 1, "tokens"),),
    (SplitAttention("layers.*.attention", TOKENS, TOKENS),),
)
Z_IMAGE = replace(controlled(_Z_IMAGE, "tokens", "controlnet_block_samples"), takes_options=True)
_HUNYUAN_VIDEO_15 = two_streams(
    "transformer_blocks",
    more=(
        Split("transformer_blocks.*", "attention_mask", 1, TEXT),
        Split("transformer_blocks.*", "freqs_cis", 0, IMAGE),
    ),
)
HUNYUAN_VIDEO_15 = replace(_HUNYUAN_VIDEO_15, takes_options=True)
HUNYUAN_VIDEO = replace(
    two_streams(
        "transformer_blocks",
        "single_transformer_blocks",
        more=(
            Split("transformer_blocks.*", "attention_mask", 3, ("image", "text")),
            Split("transformer_blocks.*", "freqs_cis", 0, IMAGE),
            Split("single_transformer_blocks.*", "attention_mask", 3, ("image", "text")),
            Split("single_transformer_blocks.*", "image_rotary_emb", 0, IMAGE),
        ),
    ),
    reads_images=True,
    takes_options=True,
)
#: without positions of tokens: they are added where the image is cut into patches
_SD3_CONTROLS = "block_controlnet_hidden_states"
SD3 = controlled(two_streams("transformer_blocks"), "image", _SD3_CONTROLS)
#: blocks that read the image once more
SD35_MEDIUM = controlled(two_streams("transformer_blocks", attention=("attn", "attn2")), "image", _SD3_CONTROLS)
CHROMA = two_streams(
    "transformer_blocks",
    "single_transformer_blocks",
    ids=True,
    more=(Split("", "attention_mask", 1, BOTH),),
)
AURAFLOW = two_streams("joint_transformer_blocks", "single_transformer_blocks")
HUNYUAN_IMAGE = two_streams(
    "transformer_blocks",
    "single_transformer_blocks",
    more=tuple(
        split
        for blocks in ("transformer_blocks", "single_transformer_blocks")
        for split in (
            Split(f"{blocks}.*", "attention_mask", 3, ("image", "text")),
            Split(f"{blocks}.*", "image_rotary_emb", 0, IMAGE),
        )
    ),
)
COGVIEW3_PLUS = two_streams("transformer_blocks", attention=("attn1",))
_ROTATED = Split("transformer_blocks.*", "image_rotary_emb", 0, IMAGE)
COGVIEW4 = two_streams("transformer_blocks", attention=("attn1",), more=(_ROTATED,))
COGVIDEOX = replace(COGVIEW4, reads_images=True, follows_videos=True)
#: its attention leaves out words that only fill a text up
MOCHI = two_streams(
    "transformer_blocks",
    attention=("attn1",),
    leaves_out=True,
    more=(_ROTATED, Split("transformer_blocks.*", "encoder_attention_mask", 1, TEXT)),
)
JOYIMAGE = two_streams(
    "double_blocks",
    more=(
        Split("double_blocks.*", "image_rotary_emb.0", 0, IMAGE),
        Split("double_blocks.*", "image_rotary_emb.1", 0, TEXT),
    ),
)
PIXART = one_stream("transformer_blocks")
HUNYUAN_DIT = controlled(
    one_stream("blocks", Split("blocks.*", "image_rotary_emb", 0, IMAGE), gathered="proj_out"),
    "image",
    "controlnet_block_samples",
)
ALLEGRO = one_stream("transformer_blocks", Split("transformer_blocks.*", "image_rotary_emb.1", 2, IMAGE))
_COSMOS = one_stream(
    "transformer_blocks",
    _ROTATED,
    Split("transformer_blocks.*", "extra_pos_emb", 1, IMAGE),
    *(Split("transformer_blocks.*", name, 1, IMAGE, dims=3, whole=2) for name in ("temb", "embedded_timestep")),
)
COSMOS = replace(_COSMOS, reads_images=True)
KANDINSKY5 = one_stream(
    "visual_transformer_blocks",
    Split("visual_transformer_blocks.*", "rope", 1, IMAGE),
    hidden="visual_embed",
    attention="self_attention",
)
#: its audio is complete on every member, as in LTX-2
KANDINSKY6 = SequencePlan(
    (
        Split("visual_transformer_blocks.0", "vis", 1, IMAGE),
        Split("visual_transformer_blocks.*", "vis_rope", 0, IMAGE),
    ),
    (Gather("visual_transformer_blocks.-1", 1, "image"),),
    (
        SplitAttention("visual_transformer_blocks.*.video_dec_block.self_attention", IMAGE, IMAGE),
        SplitAttention("visual_transformer_blocks.*.av_cross_attention", (), IMAGE),
    ),
    reads_images=True,
)
#: words and patches are one sequence
LUMINA_2 = one_stream(
    "layers",
    Split("layers.*", "image_rotary_emb", 1, TOKENS),
    attention="attn",
    segment="tokens",
)
#: words, reference images and patches are one sequence
OMNIGEN_2 = replace(LUMINA_2, reads_references=True)
KREA_2 = one_stream(
    "transformer_blocks",
    Split("transformer_blocks.*", "image_rotary_emb", 0, TOKENS),
    attention="attn",
    segment="tokens",
)
#: the sequence is the first dimension of its states and of its modulation
ERNIE_IMAGE = SequencePlan(
    (
        Split("layers.0", "x", 0, TOKENS),
        Split("layers.*", "rotary_pos_emb", 1, TOKENS),
        Split("layers.*", "temb", 0, TOKENS),
        Split("layers.*", "attention_mask", 3, TOKENS),
    ),
    (Gather("layers.-1", 0, "tokens"),),
    (SplitAttention("layers.*.self_attention", TOKENS, TOKENS),),
)
#: hints are made from the video as it comes in, and are added behind some of the blocks
WAN_VACE = SequencePlan(
    (
        Split("vace_blocks.*", "hidden_states", 1, IMAGE),
        Split("vace_blocks.0", "control_hidden_states", 1, IMAGE),
        Split("vace_blocks.*", "rotary_emb", 1, IMAGE),
        Split("blocks.0", "hidden_states", 1, IMAGE),
        Split("blocks.*", "rotary_emb", 1, IMAGE),
    ),
    (Gather("proj_out", 1, "image"),),
    (SplitAttention("vace_blocks.*.attn1", IMAGE, IMAGE), SplitAttention("blocks.*.attn1", IMAGE, IMAGE)),
    follows_videos=True,
)
#: what reads a face divides the tokens of the video by frames
WAN_ANIMATE = replace(
    WAN,
    gathers=(Gather("proj_out", 1, "image"),),
    undivided=(Undivided("face_adapter.*", "hidden_states", 1, "image"),),
    takes_options=False,
)
