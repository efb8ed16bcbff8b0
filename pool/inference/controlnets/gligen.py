"""`Gligen`: texts in boxes of an image, read by gated self-attentions between the attentions of a UNet's blocks.

The architecture of GLIGEN (Li et al., 2023, arXiv 2301.07093): a small network makes one token of each box from the
pooled text and the position, and each block of the UNet lets its image attend to these tokens, too. The modules are
diffusers'; the layers of the file have the order of the UNet's blocks.

Shape legend: B batch, N boxes, V width of a pooled text, C width of a token, L rows of the image, D width of a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention import GatedSelfAttentionDense
from diffusers.models.embeddings import GLIGENTextBoundingboxProjection, get_fourier_embeds_from_boundingbox
from torch import Tensor, nn

from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.diffusers_private import differing_keys
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.values.core.refs import MOST_BOXES
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover
from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill

#: heads of the attentions, which no tensor tells: those of Stable Diffusion 1
HEADS = 8
#: numbers of a position: sines and cosines of eight frequencies, for each side of a box
_POSITION = 8 * 2 * 4
#: the layers of a block, in the published naming and in diffusers'
_LAYER = re.compile(
    r"^(?:model\.diffusion_model\.)?"
    r"(?:(?P<published>input_blocks|middle_block|output_blocks)|(?P<diffusers>down_blocks|mid_block|up_blocks))"
    r"\.(?P<place>[\d.]*\d(?:\.attentions\.\d+)?|attentions\.\d+)\.transformer_blocks\.(?P<index>\d+)"
    r"\.fuser\.(?P<name>.+)$"
)
_STAGES = {
    "input_blocks": 0, "middle_block": 1, "output_blocks": 2, "down_blocks": 0, "mid_block": 1, "up_blocks": 2,
}  # fmt: skip
_NET = re.compile(r"^(?:model\.diffusion_model\.)?(?P<name>position_net\..+)$")
#: the layer of a position net that reads texts; other kinds of GLIGEN have other names
_FIRST, _LAST = "position_net.linears.0.weight", "position_net.linears.4.weight"


class Gligen(nn.Module):
    """The network that makes the tokens of boxes, and the attention of each block of a UNet that reads them."""

    def __init__(self, text_width: int, token_width: int, widths: Sequence[int]) -> None:
        """`widths` are the widths of the UNet's blocks, in execution order."""
        super().__init__()
        self.position_net: Any = GLIGENTextBoundingboxProjection(text_width, token_width)
        self.fusers = nn.ModuleList(
            GatedSelfAttentionDense(width, token_width, HEADS, width // HEADS) for width in widths
        )

    def tokens(self, texts_NV: Tensor, boxes_N4: Tensor) -> Tensor:
        """Return the tokens of boxes, [1, MOST_BOXES, C]: of fewer boxes, the other tokens are of none. `boxes_N4` are
        left, top, right and bottom as shares of the sides, float32."""
        net, count = self.position_net, len(texts_NV)
        places_ND = get_fourier_embeds_from_boundingbox(net.fourier_embedder_dim, boxes_N4[None])[0].to(texts_NV)
        texts = [texts_NV, net.null_positive_feature.to(texts_NV).expand(MOST_BOXES - count, -1)]
        places = [places_ND, net.null_position_feature.to(texts_NV).expand(MOST_BOXES - count, -1)]
        made_NC: Tensor = net.linears(torch.cat([torch.cat(texts), torch.cat(places)], dim=-1)[None])
        return made_NC

    def fused(self, number: int, x_BLD: Tensor, tokens_BNC: Tensor) -> Tensor:
        """Return the rows of the image in the block with this number, after they have attended to the tokens."""
        fused_BLD: Tensor = self.fusers[number](x_BLD, tokens_BNC)
        return fused_BLD

    def forward(self, x_BLD: Tensor, tokens_BNC: Tensor) -> Tensor:
        """`fused` by the first block."""
        return self.fused(0, x_BLD, tokens_BNC)


@dataclass(frozen=True, slots=True)
class GligenPlan:
    """The plan for building the GLIGEN model of a file.

    text_width   of the pooled text that it reads
    token_width  of a box
    widths       of the UNet's blocks, in execution order
    key_map      between the file's tensors and the module's parameters
    unused       keys of the file that the module does not have
    """

    text_width: int
    token_width: int
    widths: tuple[int, ...]
    key_map: KeyMap
    unused: tuple[str, ...] = ()

    def build(self, tensors: Mapping[str, Tensor]) -> Gligen:
        """Return the module over `tensors` (keys as in the file), in evaluation mode. Raises UnknownArchitecture if the
        file's tensors do not fit the class."""
        given = {"text_width": self.text_width, "token_width": self.token_width, "widths": self.widths}
        module = empty_module(Gligen, given)
        assert isinstance(module, Gligen)
        if difference := differing_keys(self.key_map, module):
            raise UnknownArchitecture(f"recognised as a GLIGEN model, but {difference}")
        fill(module, self.key_map.load(tensors))
        assert_filled(module)
        return module


def plan_gligen(shapes: Mapping[str, Shape]) -> GligenPlan:
    """Return how to build the GLIGEN model among `shapes`. Raises UnknownArchitecture if there is none, or one that
    reads something else than texts."""
    names = named(shapes)
    found = {name: tuple(shapes[key]) for name, key in names.items()}
    if _FIRST not in found or _LAST not in found or "fusers.0.linear.weight" not in found:
        first = ", ".join(list(shapes)[:3]) or "none"
        unknown = f"its {counted(len(shapes), 'tensor is', 'tensors are')} no GLIGEN model (the first are {first})"
        raise UnknownArchitecture(mistaken(shapes, "a GLIGEN model that this version runs", unknown))

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[key] for name, key in names.items()}

    try:
        text_width, token_width = found[_FIRST][1] - _POSITION, found[_LAST][0]
        count = len({name.split(".")[1] for name in found if name.startswith("fusers.")})
        widths = tuple(found[f"fusers.{number}.linear.weight"][0] for number in range(count))
        used = {key: tuple(shapes[key]) for key in names.values()}
        key_map = discover(used, convert)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as a GLIGEN model, but with unexpected tensors: {error!r}") from error
    if uneven := [width for width in widths if width % HEADS]:
        raise UnknownArchitecture(f"recognised as a GLIGEN model, but with a block of width {uneven[0]}")
    unused = (*(key for key in shapes if key not in used), *key_map.unused)
    return GligenPlan(text_width, token_width, widths, key_map, unused)


def named(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a file by the names of their parameters: "position_net." and, numbered in the order in which a
    UNet runs them, "fusers.N."."""
    found = {match["name"]: key for key in keys if (match := _NET.match(key))}
    layers: dict[tuple[int, ...], dict[str, str]] = {}
    for key in keys:
        if match := _LAYER.match(key):
            numbers = [int(part) for part in re.findall(r"\d+", match["place"])]
            stage = match["published"] or match["diffusers"]
            place = (_STAGES[stage], *numbers, int(match["index"]))
            layers.setdefault(place, {})[match["name"]] = key
    for number, place in enumerate(sorted(layers)):
        found |= {f"fusers.{number}.{name}": key for name, key in layers[place].items()}
    return found
