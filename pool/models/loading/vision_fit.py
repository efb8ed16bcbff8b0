"""Checks that the vision encoder of a checkpoint fits its diffusion model, from keys and shapes. Torch-free.

Checks the tensors that determine the number and width of an image's states, and the width that the diffusion model
reads. The build plan of each component checks the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.unet_families import UNETS
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse
from modelpool.pool.values.specs.spec import Role

#: keys of vision encoders, as open_clip and transformers name them, without prefix: the position table, with one row
#: for each patch of a square and one more; and the projection, with the dimension that is its output
_POSITIONS = ("positional_embedding", "embeddings.position_embedding.weight")
_PROJECTIONS = {"proj": 1, "visual_projection.weight": 0}
_LEVEL = "vision_model."
#: of encoders with states inserted between text tokens: the suffix of the projection; and the embedding table of text
#: encoders
_PROJECTOR_OUT, _TOKEN_TABLE = "multi_modal_projector.linear_2.weight", "embed_tokens.weight"
#: of diffusion models that read states in addition to a text: the norm of the states, and the table that is added to
#: the states of all images. As published and in diffusers' naming
_NORMS = ("img_emb.proj.0.bias", "condition_embedder.image_embedder.norm1.weight")
_TABLES = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
#: of those that read them as class labels, followed by as many numbers of the noise on them
_LABELS = ("label_emb.0.0.weight", "class_embedding.linear_1.weight")
#: of those that read them instead of a text
_ATTENTION = ".attn2.to_k.weight"


def check_vision_encoder(family: LocatedFamily, header: Header, shapes: Mapping[str, Shape]) -> None:
    """Check that the vision encoder of a checkpoint of `family`, with header `header` and tensors of `shapes`, fits its
    diffusion model; does nothing for those without one.

    Raises UnknownArchitecture naming the file, and the encoder's file if it is one of several.
    """
    vision_use = family.sampling.vision_use
    if vision_use is None or Role.VISION_ENCODER not in family.prefixes:
        return
    if not vision_use.is_model_input:
        _check_projector(family, header, shapes)
        return
    shapes_of_encoder = {
        key.removeprefix(_LEVEL): shape for key, shape in family.bare_shapes_of(Role.VISION_ENCODER, shapes).items()
    }
    model = family.bare_shapes_of(Role.DIFFUSION_MODEL, shapes)
    of = f"{header.path}: recognised as {family.title}, but its vision encoder{_place(family, header)}"
    positions = _first(shapes_of_encoder, _POSITIONS, 2)
    if positions is None:
        raise UnknownArchitecture(f"{of} has no table of positions, expected {' or '.join(_POSITIONS)}")
    rows, width = positions
    side = math.isqrt(max(rows - 1, 0))
    if side < 1 or side**2 != rows - 1:
        raise UnknownArchitecture(
            f"{of} has {rows} positions, expected one more than the patches of a square of at least one patch"
        )
    states = rows
    if vision_use in (VisionEncoderUse.PROJECTED, VisionEncoderUse.CENTER_PROJECTED):
        states, width = 1, _projected(shapes_of_encoder, of)
    reads = _width_read(model, family.sampling.reads_text)
    if reads is not None and width != reads:
        raise UnknownArchitecture(f"{of} gives states of width {width}, expected {reads} as its diffusion model reads")
    video, table = family.sampling.video, _first(model, _TABLES, 3)
    if table is not None and video is not None and table[1] != video.images_encoded * states:
        raise UnknownArchitecture(
            f"{of} gives {states} states of each of {video.images_encoded} images, expected {table[1]} of all as its "
            f"diffusion model has positions"
        )


def vision_encoder_name(family: LocatedFamily) -> str:
    """Return the name of the vision encoder of `family`, which must have one."""
    vision_use = family.sampling.vision_use
    unet = UNETS.get(family.name)
    if unet is not None and unet.vision_encoder:
        return unet.vision_encoder
    return "clip_vision_h" if vision_use is None or vision_use.is_model_input else "llava_llama3_vision"


def _check_projector(family: LocatedFamily, header: Header, shapes: Mapping[str, Shape]) -> None:
    """Check that states that are inserted between text tokens have the width of those."""
    encoder_shapes = family.shapes_of(Role.VISION_ENCODER, shapes)
    width = next(
        (shape[0] for key, shape in encoder_shapes.items() if key.endswith(_PROJECTOR_OUT) and len(shape) == 2), None
    )
    tables = (
        shape[1]
        for role in family.text_encoders
        for key, shape in family.shapes_of(role, shapes).items()
        if key.endswith(_TOKEN_TABLE) and len(shape) == 2
    )
    text_width = next(tables, width)
    if width is None or width != text_width:
        found = f"no {_PROJECTOR_OUT}" if width is None else f"states of width {width}"
        place = _place(family, header)
        of = f"{header.path}: recognised as {family.title}, but its vision encoder{place} gives {found}"
        raise UnknownArchitecture(
            f"{of}, expected {'a projection to' if text_width is None else text_width} as text tokens have"
        )


def _projected(shapes_of_encoder: Mapping[str, Shape], of: str) -> int:
    """Return the width of the one state of a projected image."""
    for key, output in _PROJECTIONS.items():
        shape = shapes_of_encoder.get(key, ())
        if len(shape) == 2:
            return shape[output]
    raise UnknownArchitecture(f"{of} has no projection, expected {' or '.join(_PROJECTIONS)} in two dimensions")


def _width_read(model: Mapping[str, Shape], reads_text: bool) -> int | None:
    """Return the width of the states that the diffusion model reads; None if no tensor determines it, which its plan
    reports."""
    if reads_text:
        labels = _first(model, _LABELS, 2)
        if labels is not None:
            return labels[1] // 2
        norm = _first(model, _NORMS, 1)
        return None if norm is None else norm[0]
    shape = next((shape for key, shape in model.items() if key.endswith(_ATTENTION) and len(shape) == 2), None)
    return None if shape is None else shape[1]


def _first(shapes: Mapping[str, Shape], keys: Iterable[str], dimensions: int) -> Shape | None:
    """Return the shape of the first of `keys` that exists with that number of dimensions."""
    return next((shapes[key] for key in keys if len(shapes.get(key, ())) == dimensions), None)


def _place(family: LocatedFamily, header: Header) -> str:
    """Return the file of the vision encoder, if it is one of several."""
    key = next((key for key in header.tensors if key.startswith(family.prefixes[Role.VISION_ENCODER])), None)
    path = header.path if key is None else header.path_of(key)
    return "" if path == header.path else f" in {path}"
