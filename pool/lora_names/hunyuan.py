"""The two key namings of HunyuanVideo's checkpoints: that of its original code, and the one with the names of Flux.
Torch-free.

Files are published in both. diffusers converts the original one; LoRAs use either.
"""

from __future__ import annotations

#: a piece of a key in Flux's naming and in that of the original code; a piece that contains another precedes it
_PIECES = (
    ("_attn.qkv.", "_attn_qkv."),
    ("_attn.proj.", "_attn_proj."),
    ("_attn.norm.query_norm.", "_attn_q_norm."),
    ("_attn.norm.key_norm.", "_attn_k_norm."),
    (".norm.query_norm.", ".q_norm."),
    (".norm.key_norm.", ".k_norm."),
    ("_mod.lin.", "_mod.linear."),
    (".modulation.lin.", ".modulation.linear."),
    ("img_mlp.0.", "img_mlp.fc1."),
    ("img_mlp.2.", "img_mlp.fc2."),
    ("txt_mlp.0.", "txt_mlp.fc1."),
    ("txt_mlp.2.", "txt_mlp.fc2."),
    ("time_in.in_layer.", "time_in.mlp.0."),
    ("time_in.out_layer.", "time_in.mlp.2."),
    ("guidance_in.in_layer.", "guidance_in.mlp.0."),
    ("guidance_in.out_layer.", "guidance_in.mlp.2."),
    ("t_embedder.in_layer.", "t_embedder.mlp.0."),
    ("t_embedder.out_layer.", "t_embedder.mlp.2."),
    ("c_embedder.in_layer.", "c_embedder.linear_1."),
    ("c_embedder.out_layer.", "c_embedder.linear_2."),
)
#: the same in the blocks of the text refiner; other modules use other names
_REFINER = "individual_token_refiner."
_REFINER_PIECES = (
    (".mlp.0.", ".mlp.fc1."),
    (".mlp.2.", ".mlp.fc2."),
)


def original_key(key: str) -> str:
    """Return `key` in the original naming, whichever it is in."""
    renamed = original_base(key)
    return renamed.removesuffix("scale") + "weight" if renamed.endswith(("q_norm.scale", "k_norm.scale")) else renamed


def original_base(base: str) -> str:
    """Return the same as `original_key`, for a key without its last part."""
    return _renamed(base, (*_PIECES, *_REFINER_PIECES) if _REFINER in base else _PIECES)


def flux_base(base: str) -> str:
    """Return `base` in the naming of Flux, whichever it is in."""
    pieces = (*_PIECES, *_REFINER_PIECES) if _REFINER in base else _PIECES
    return _renamed(base, tuple((new, old) for old, new in pieces))


def _renamed(text: str, pieces: tuple[tuple[str, str], ...]) -> str:
    text += "."
    for old, new in pieces:
        text = text.replace(old, new)
    return text.removesuffix(".")
