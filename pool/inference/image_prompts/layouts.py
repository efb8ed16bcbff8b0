"""Key layouts of image prompt adapters: which kind a file is, its sizes, and its parameters under the module's names.

One row for each kind. Pure; knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from diffusers import ReduxImageEncoder
from diffusers.models.embeddings import (
    ImageProjection,
    IPAdapterFaceIDImageProjection,
    IPAdapterFaceIDPlusImageProjection,
    IPAdapterFullImageProjection,
    IPAdapterPlusImageProjection,
)
from torch import Tensor, nn

from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse

Shapes: TypeAlias = Mapping[str, Shape]
Arguments: TypeAlias = dict[str, Any]

#: key prefixes of the projection of image states to tokens: of most files, and of XLabs
PROJECTIONS = ("image_proj.", "ip_adapter_proj_model.")
#: width of a head of the resampler. Source: tencent-ailab/IP-Adapter, `Resampler`
_HEAD = 64
#: the layers that read the tokens: of most files, and of XLabs
_LAYERS = (
    re.compile(r"^ip_adapter\.(\d+)\.to_([kv])_ip\.(weight|bias)$"),
    re.compile(r"^double_blocks\.(\d+)\.processor\.ip_adapter_double_stream_([kv])_proj\.(weight|bias)$"),
)


class BlockReading(Enum):
    """Where the blocks of Flux read the tokens of an image."""

    #: in double blocks, with the queries of the image; the result is added to the image after the block (XLabs)
    AFTER_BLOCK = "after block"
    #: in all blocks, with keys that are normalized; the result is added to the attention's (InstantX)
    IN_ATTENTION = "in attention"


@dataclass(frozen=True, slots=True)
class FileLayers:
    """The layers of a file, in the order of the attentions that they are for: the keys of the weights for keys and for
    values, and of the biases, if it has any. `of_blocks`: they are for the blocks of a transformer, not for the
    cross-attentions of a UNet."""

    weights: tuple[tuple[str, str], ...] = ()
    biases: tuple[tuple[str, str], ...] = ()
    of_blocks: bool = False


@dataclass(frozen=True, slots=True)
class PromptKind:
    """One kind of image prompt adapter.

    title      for display
    sign       a key (without prefix) that only this kind has among the kinds below it
    module     class of its projection
    arguments  of the class, from the shapes of the file's projection
    names      renames of keys to parameters of the class: patterns, applied in order
    use        output of the vision encoder that it reads; None if it reads the embedding of a face only
    reads_face  it reads the embedding of a face, alone or in addition
    appends    its tokens are appended to the text; otherwise layers of the diffusion model read them
    blocks     where the blocks of Flux read them; None if it is not for Flux, or appends
    one_state  its projection reads one state of an image
    """

    title: str
    sign: str
    module: type[nn.Module]
    arguments: Callable[[Shapes], Arguments]
    names: tuple[tuple[str, str], ...]
    use: VisionEncoderUse | None
    reads_face: bool = False
    appends: bool = False
    blocks: BlockReading | None = None
    one_state: bool = False


def _plain(shapes: Shapes) -> Arguments:
    width = shapes["norm.weight"][0]
    rows, states = shapes["proj.weight"]
    return {"image_embed_dim": states, "cross_attention_dim": width, "num_image_text_embeds": rows // width}


def _full(shapes: Shapes) -> Arguments:
    return {"image_embed_dim": shapes["proj.0.weight"][0], "cross_attention_dim": shapes["proj.3.weight"][0]}


def _face(shapes: Shapes) -> Arguments:
    hidden, states = shapes["proj.0.weight"]
    width = shapes["norm.weight"][0]
    tokens = shapes["proj.2.weight"][0] // width
    return {
        "image_embed_dim": states,
        "cross_attention_dim": width,
        "mult": hidden // states,
        "num_tokens": tokens,
    }


def _resampler(shapes: Shapes, prefix: str = "") -> Arguments:
    layers = {key.removeprefix(prefix).split(".")[1] for key in shapes if key.startswith(f"{prefix}layers.")}
    rows, hidden = shapes[f"{prefix}layers.0.1.1.weight"]
    return {
        "output_dims": shapes[f"{prefix}proj_out.weight"][0],
        "heads": shapes[f"{prefix}layers.0.0.to_q.weight"][0] // _HEAD,
        "depth": len(layers),
        "ffn_ratio": rows // hidden,
    }


def _plus(shapes: Shapes) -> Arguments:
    _, queries, hidden = shapes["latents"]
    return {
        **_resampler(shapes),
        "embed_dims": shapes["proj_in.weight"][1],
        "hidden_dims": hidden,
        "num_queries": queries,
    }


def _face_plus(shapes: Shapes) -> Arguments:
    prefix = "perceiver_resampler."
    width, hidden = shapes[f"{prefix}proj_in.weight"]
    return {
        **_resampler(shapes, prefix),
        "embed_dims": width,
        "hidden_dims": hidden,
        "id_embeddings_dim": shapes["proj.0.weight"][1],
        "num_tokens": shapes["proj.2.weight"][0] // width,
        "ffproj_ratio": shapes["proj.0.weight"][0] // shapes["proj.0.weight"][1],
    }


def _redux(shapes: Shapes) -> Arguments:
    return {"redux_dim": shapes["redux_up.weight"][1], "txt_in_features": shapes["redux_down.weight"][0]}


_RESAMPLER_NAMES = (
    (r"^perceiver_resampler\.", ""),
    (r"^layers\.(\d+)\.0\.norm1\.", r"layers.\1.ln0."),
    (r"^layers\.(\d+)\.0\.norm2\.", r"layers.\1.ln1."),
    (r"^layers\.(\d+)\.0\.to_out\.", r"layers.\1.attn.to_out.0."),
    (r"^layers\.(\d+)\.0\.to_", r"layers.\1.attn.to_"),
    (r"^layers\.(\d+)\.1\.0\.", r"layers.\1.ff.0."),
    (r"^layers\.(\d+)\.1\.1\.", r"layers.\1.ff.1.net.0.proj."),
    (r"^layers\.(\d+)\.1\.3\.", r"layers.\1.ff.1.net.2."),
)
_MLP_NAMES = ((r"^proj\.0\.", "ff.net.0.proj."), (r"^proj\.2\.", "ff.net.2."), (r"^proj\.3\.", "norm."))
_FACE_MLP_NAMES = ((r"^proj\.0\.", "proj.net.0.proj."), (r"^proj\.2\.", "proj.net.2."))

#: the first match counts. Source of the layouts: h94/IP-Adapter, h94/IP-Adapter-FaceID, FLUX.1-Redux-dev,
#: XLabs-AI/flux-ip-adapter-v2, InstantX/FLUX.1-dev-IP-Adapter
KINDS: tuple[PromptKind, ...] = (
    PromptKind(
        "Redux", "redux_up.weight", ReduxImageEncoder, _redux, (), VisionEncoderUse.LAST, appends=True
    ),
    PromptKind(
        "IP-Adapter", "proj.weight", ImageProjection, _plain,
        ((r"^proj\.", "image_embeds."),), VisionEncoderUse.CENTER_PROJECTED, one_state=True,
    ),
    PromptKind(
        "IP-Adapter of Flux by XLabs", "proj.weight", ImageProjection, _plain,
        ((r"^proj\.", "image_embeds."),), VisionEncoderUse.CENTER_PROJECTED, blocks=BlockReading.AFTER_BLOCK,
        one_state=True,
    ),
    # the projection of a face, which reads the pooled state of an image here
    PromptKind(
        "IP-Adapter of Flux by InstantX", "proj.2.weight", IPAdapterFaceIDImageProjection, _face,
        _MLP_NAMES, VisionEncoderUse.POOLED, blocks=BlockReading.IN_ATTENTION, one_state=True,
    ),
    PromptKind(
        "IP-Adapter Full Face", "proj.3.weight", IPAdapterFullImageProjection, _full,
        _MLP_NAMES, VisionEncoderUse.PENULTIMATE,
    ),
    PromptKind(
        "IP-Adapter FaceID Plus", "perceiver_resampler.proj_in.weight", IPAdapterFaceIDPlusImageProjection, _face_plus,
        (*_FACE_MLP_NAMES, *_RESAMPLER_NAMES), VisionEncoderUse.PENULTIMATE, reads_face=True,
    ),
    PromptKind(
        "IP-Adapter FaceID", "proj.2.weight", IPAdapterFaceIDImageProjection, _face,
        _MLP_NAMES, None, reads_face=True,
    ),
    PromptKind(
        "IP-Adapter Plus", "latents", IPAdapterPlusImageProjection, _plus,
        _RESAMPLER_NAMES, VisionEncoderUse.PENULTIMATE,
    ),
)  # fmt: skip


def split_names(shapes: Shapes) -> tuple[dict[str, str], FileLayers]:
    """Return the keys of the projection, by their names without prefix, and the layers. Raises UnknownArchitecture if
    there is no projection."""
    if "redux_up.weight" in shapes:
        return {key: key for key in shapes if key.startswith("redux_")}, FileLayers()
    projection = {key.removeprefix(prefix): key for prefix in PROJECTIONS for key in shapes if key.startswith(prefix)}
    found: dict[str, dict[int, dict[str, str]]] = {"weight": {}, "bias": {}}
    for key in shapes:
        for pattern in _LAYERS:
            if match := pattern.match(key):
                found[match[3]].setdefault(int(match[1]), {})[match[2]] = key
    weights, biases = found["weight"], found["bias"]
    is_whole = all(len(pair) == 2 for table in found.values() for pair in table.values())
    if not projection or not weights or not is_whole or (biases and biases.keys() != weights.keys()):
        first = ", ".join(list(shapes)[:3]) or "none"
        unknown = (
            f"its {counted(len(shapes), 'tensor is', 'tensors are')} no image prompt adapter (the first are {first})"
        )
        raise UnknownArchitecture(mistaken(shapes, "an image prompt adapter that this version runs", unknown))
    # layers of UNets have odd numbers: even ones are of attentions that read no text
    return projection, FileLayers(_in_order(weights), _in_order(biases), of_blocks=min(weights) == 0)


def _in_order(table: Mapping[int, Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((table[number]["k"], table[number]["v"]) for number in sorted(table))


def prompt_kind_among(names: Mapping[str, Shape], of_blocks: bool = False) -> PromptKind:
    """Return the kind of adapter with these tensors as projection, among the kinds for the blocks of a transformer, or
    among the others. Raises UnknownArchitecture."""
    kinds = (kind for kind in KINDS if (kind.blocks is not None) == of_blocks)
    kind = next((kind for kind in kinds if kind.sign in names), None)
    if kind is None:
        first = ", ".join(list(names)[:3]) or "none"
        raise UnknownArchitecture(f"its projection is of no known image prompt adapter (the first tensors are {first})")
    return kind


def named_projection(kind: PromptKind, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the projection's tensors under the names of its class."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key
        for pattern, replacement in kind.names:
            name = re.sub(pattern, replacement, name)
        if ".to_kv." in name:
            for one, rows in zip("kv", tensor.chunk(2, dim=0), strict=True):
                found[name.replace(".to_kv.", f".to_{one}.")] = rows
        else:
            found[name] = tensor
    return found
