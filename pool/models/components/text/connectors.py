"""The part of LTX-2 that joins the states of all layers of its text encoder, once for frames and once for audio.

Knows its names in single files and in folders, its class in diffusers, and how it is called.

Legend: B texts (1), L tokens, D width of a token's state, S states of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import Arguments, Shapes
from modelpool.pool.families.parts.text_join import ReadText
from modelpool.pool.files.formats.folder_header import CONNECTORS
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.diffusion.folder_config import config_arguments
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.models.components.text.configs import count
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

#: width of a head, which no shape determines. Source: diffusers' scripts/convert_ltx2_to_diffusers.py
_HEAD = 128
_PROJECTION = "text_proj_in.weight"
_NAMES = (
    ("text_embedding_projection.aggregate_embed.", "text_proj_in."),
    ("video_embeddings_connector.", "video_connector."),
    ("audio_embeddings_connector.", "audio_connector."),
)
_INNER = ((".transformer_1d_blocks.", ".transformer_blocks."), (".q_norm.", ".norm_q."), (".k_norm.", ".norm_k."))


def plan_connectors(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None = None) -> tuple[nn.Module, KeyMap]:
    """Return the module of the part among `shapes` (keys as in the file) without weights, and its key map. `config` is
    its config.json, if one exists: it supplies what shapes do not tell.

    Raises UnknownArchitecture if there is none.
    """
    key_map = discover({key: tuple(shape) for key, shape in shapes.items()}, _converted)
    projection = key_map.shapes.get(_PROJECTION, ())
    if len(projection) != 2:
        raise UnknownArchitecture(
            f"LTX-2: found {counted(len(shapes), 'tensor')} "
            f"of the part that joins the states of the text encoder, expected "
            f"{_PROJECTION} with two dimensions among them"
        )
    arguments = _arguments(key_map.shapes)
    if config is not None:
        arguments |= config_arguments(LTX2TextConnectors, config, len(shapes))
    module = empty_module(LTX2TextConnectors, arguments)
    return module, fitted(key_map, module, "recognised as the text connectors of LTX-2, but")


def connected(module: nn.Module, read: Sequence[ReadText], dtype: torch.dtype) -> tuple[ReadText, ...]:
    """Return the texts that `read` has in all layers of the text encoder, as the model reads them: the states for
    frames, and behind them those for audio, float32. `module` computes in `dtype`, one text after the other."""
    return tuple(_connected(module, text, dtype) for text in read)


def connected_width(module: nn.Module) -> int:
    """Return the width of `connected` states."""
    own: Any = module
    return int(own.video_connector.inner_dim + own.audio_connector.inner_dim)


def empty_states(module: nn.Module, tokens: int) -> ReadText:
    """Return a text of `tokens` tokens as `module` reads it, without values."""
    own: Any = module
    width, states = own.config.caption_channels, own.config.text_proj_in_factor
    return ReadText(torch.empty((states, tokens, width), device="meta"))


def _connected(module: nn.Module, text: ReadText, dtype: torch.dtype) -> ReadText:
    states_BLDS = text.context_LD.permute(1, 2, 0).unsqueeze(0).to(dtype)
    mask_BL = torch.ones(states_BLDS.shape[:2], dtype=torch.long, device=states_BLDS.device)
    if text.mask_L is not None:
        mask_BL = text.mask_L.long().unsqueeze(0)
    with torch.no_grad():
        video_BLD, audio_BLD, _ = module(states_BLDS, mask_BL, padding_side="left")
    return ReadText(torch.cat((video_BLD, audio_BLD), dim=-1)[0].float(), cut_tokens=text.cut_tokens)


def _arguments(shapes: Shapes) -> Arguments:
    """Return the arguments of the class, with the published ones for positions."""
    width, states = shapes[_PROJECTION]
    found: Arguments = {"caption_channels": width, "text_proj_in_factor": states // width, "rope_type": "split"}
    for name in ("video_connector", "audio_connector"):
        blocks = f"{name}.transformer_blocks."
        inner = shapes.get(f"{blocks}0.attn1.to_q.weight", (width,))[0]
        registers = shapes.get(f"{name}.learnable_registers")
        head = min(_HEAD, inner)
        found |= {
            f"{name}_num_attention_heads": inner // head,
            f"{name}_attention_head_dim": head,
            f"{name}_num_layers": count(shapes, rf"{name}\.transformer_blocks\.(\d+)\."),
            f"{name}_num_learnable_registers": None if registers is None else registers[0],
        }
    return found


def _converted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters from tensors with keys as in a single file, or as in a folder."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(f"{CONNECTORS}.")
        for old, new in _NAMES:
            _, found, rest = name.partition(old)
            name = new + rest if found else name
        for old, new in _INNER:
            name = name.replace(old, new)
        converted[name] = tensor
    return converted
