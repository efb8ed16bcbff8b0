"""Whether the vision encoder of a checkpoint says what its diffusion model reads, from keys and shapes. Torch-free.

Which tensors are looked at: those that tell how many states there are of an image, how wide they are, and how wide
states the diffusion model takes in. Whether the rest of each component is whole, its plan says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.sampling_facts import Sight
from modelpool.pool.families.family import Family
from modelpool.pool.formats.safetensors_file import Header, Shape
from modelpool.pool.specs.spec import Role

#: of vision encoders, as open_clip and transformers call them, keys without prefix: the table of positions, which are
#: those of the patches of a square and one more; and the projection, with the dimension that is its output
_POSITIONS = ("positional_embedding", "embeddings.position_embedding.weight")
_PROJECTIONS = {"proj": 1, "visual_projection.weight": 0}
_LEVEL = "vision_model."
#: of those whose states stand among words: the end of the projection; and the table of words of text encoders
_WORDS_OUT, _WORD_TABLE = "multi_modal_projector.linear_2.weight", "embed_tokens.weight"
#: of diffusion models that read states beside a text: the norm that takes them in, and the table that is added to those
#: of all images. As published and as diffusers calls them
_NORMS = ("img_emb.proj.0.bias", "condition_embedder.image_embedder.norm1.weight")
_TABLES = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
#: of those that read them in place of a text
_ATTENTION = ".attn2.to_k.weight"


def check_sight(family: Family, header: Header, shapes: Mapping[str, Shape]) -> None:
    """Check that the vision encoder of a checkpoint of `family`, which is that of `header` with tensors of `shapes`,
    fits its diffusion model; nothing of those without one.

    Raises UnknownArchitecture naming the file, and that of the encoder where it is one of several.
    """
    sight = family.sampling.sight
    if sight is None or Role.VISION_ENCODER not in family.prefixes:
        return
    if not sight.is_told:
        _check_words(family, header, shapes)
        return
    seen = {
        key.removeprefix(_LEVEL): shape for key, shape in family.bare_shapes_of(Role.VISION_ENCODER, shapes).items()
    }
    model = family.bare_shapes_of(Role.DIFFUSION_MODEL, shapes)
    of = f"{header.path}: recognised as {family.title}, but its vision encoder{_place(family, header)}"
    positions = _first(seen, _POSITIONS, 2)
    if positions is None:
        raise UnknownArchitecture(f"{of} has no table of positions, expected {' or '.join(_POSITIONS)}")
    rows, width = positions
    side = math.isqrt(max(rows - 1, 0))
    if side < 1 or side**2 != rows - 1:
        raise UnknownArchitecture(
            f"{of} has {rows} positions, expected one and those of a square of at least one patch a side"
        )
    states = rows
    if sight is Sight.PROJECTED:
        states, width = 1, _projected(seen, of)
    reads = _width_read(model, family.sampling.reads_text)
    if reads is not None and width != reads:
        raise UnknownArchitecture(f"{of} gives states of width {width}, expected {reads} as its diffusion model reads")
    video, table = family.sampling.video, _first(model, _TABLES, 3)
    if table is not None and video is not None and table[1] != video.images_seen * states:
        raise UnknownArchitecture(
            f"{of} gives {states} states of each of {video.images_seen} images, expected {table[1]} of all as its "
            f"diffusion model has positions"
        )


def vision_encoder_of(family: Family) -> str:
    """What the vision encoder of `family`, which has one, is called."""
    sight = family.sampling.sight
    return "clip_vision_h" if sight is None or sight.is_told else "llava_llama3_vision"


def _check_words(family: Family, header: Header, shapes: Mapping[str, Shape]) -> None:
    """Check that states that stand among words are as wide as those."""
    own = family.shapes_of(Role.VISION_ENCODER, shapes)
    width = next((shape[0] for key, shape in own.items() if key.endswith(_WORDS_OUT) and len(shape) == 2), None)
    tables = (
        shape[1]
        for role in family.text_encoders
        for key, shape in family.shapes_of(role, shapes).items()
        if key.endswith(_WORD_TABLE) and len(shape) == 2
    )
    words = next(tables, width)
    if width is None or width != words:
        found = f"no {_WORDS_OUT}" if width is None else f"states of width {width}"
        place = _place(family, header)
        of = f"{header.path}: recognised as {family.title}, but its vision encoder{place} gives {found}"
        raise UnknownArchitecture(f"{of}, expected {'a projection to' if words is None else words} as words have")


def _projected(seen: Mapping[str, Shape], of: str) -> int:
    """How wide the one state is that is left of an image."""
    for key, output in _PROJECTIONS.items():
        shape = seen.get(key, ())
        if len(shape) == 2:
            return shape[output]
    raise UnknownArchitecture(f"{of} has no projection, expected {' or '.join(_PROJECTIONS)} in two dimensions")


def _width_read(model: Mapping[str, Shape], reads_text: bool) -> int | None:
    """How wide states the diffusion model takes in; None where no tensor tells, which its plan complains of."""
    if reads_text:
        norm = _first(model, _NORMS, 1)
        return None if norm is None else norm[0]
    shape = next((shape for key, shape in model.items() if key.endswith(_ATTENTION) and len(shape) == 2), None)
    return None if shape is None else shape[1]


def _first(shapes: Mapping[str, Shape], keys: Iterable[str], dimensions: int) -> Shape | None:
    """The shape of the first of `keys` that is there in so many dimensions."""
    return next((shapes[key] for key in keys if len(shapes.get(key, ())) == dimensions), None)


def _place(family: Family, header: Header) -> str:
    """The file that the vision encoder is in, where that is one of several."""
    key = next((key for key in header.tensors if key.startswith(family.prefixes[Role.VISION_ENCODER])), None)
    path = header.path if key is None else header.path_of(key)
    return "" if path == header.path else f" in {path}"
