"""`ImagePromptAdapter`: the module of an image prompt adapter, and how to build it from the tensors of its file.

Shape legend: N images, L states of an image, D width of a state, T tokens of an image, C text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.image_prompts.layouts import (
    Arguments,
    BlockReading,
    PromptKind,
    named_projection,
    prompt_kind_among,
    split_names,
)
from modelpool.pool.models.components.common.diffusers_private import differing_keys
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover
from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill

#: part of the names of a LoRA in the file of an adapter
_INCLUDED_LORA = "_lora."


class ImagePromptAdapter(nn.Module):
    """The projection of image states to tokens, and the layers that read the tokens as keys and values."""

    def __init__(
        self, kind: PromptKind, arguments: Arguments, layers: list[tuple[int, int]], biased: bool = False
    ) -> None:
        """`layers` are the width of the result and of the tokens for each layer, which are `biased` in some files."""
        super().__init__()
        self.projection: Any = kind.module(**arguments)
        self.to_k = nn.ModuleList(nn.Linear(tokens, width, bias=biased) for width, tokens in layers)
        self.to_v = nn.ModuleList(nn.Linear(tokens, width, bias=biased) for width, tokens in layers)
        self._kind = kind

    @property
    def blocks(self) -> BlockReading | None:
        """Where the blocks of Flux read the tokens; None if it is not for Flux."""
        return self._kind.blocks

    def tokens(self, states_NLD: Tensor, faces_ND: Tensor | None = None, shortcut: bool = False) -> Tensor:
        """Return the tokens of images, [N, T, C]. `faces_ND` are the embeddings of faces, for adapters that read them;
        `shortcut` adds them to the result (version 2 of FaceID Plus)."""
        kind = self._kind
        if kind.appends:
            appended: Tensor = self.projection(states_NLD).image_embeds
            return appended
        if kind.use is None:
            assert faces_ND is not None, "the adapter reads a face"
            of_faces: Tensor = self.projection(faces_ND)
            return of_faces
        if kind.reads_face:
            assert faces_ND is not None, "the adapter reads a face"
            self.projection.clip_embeds, self.projection.shortcut = states_NLD[:, None], shortcut
            try:
                of_both: Tensor = self.projection(faces_ND)
            finally:
                self.projection.clip_embeds = None
            return of_both
        projected: Tensor = self.projection(states_NLD[:, 0] if kind.one_state else states_NLD)
        return projected

    def keys_and_values(self, tokens_NTC: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the tokens for each layer, each [N, T, width]."""
        return [(key(tokens_NTC), value(tokens_NTC)) for key, value in zip(self.to_k, self.to_v, strict=True)]

    def forward(self, states_NLD: Tensor, faces_ND: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return `keys_and_values` of the tokens of images."""
        return self.keys_and_values(self.tokens(states_NLD, faces_ND))


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The plan for building the adapter of a file.

    arguments  of the class of its projection
    layers     width of the result and of the tokens for each layer of the diffusion model
    biased     whether these layers have biases
    key_map    between the file's tensors and the module's parameters
    unused     keys of the file that the module does not have
    """

    kind: PromptKind
    arguments: Arguments
    layers: tuple[tuple[int, int], ...]
    biased: bool
    key_map: KeyMap
    unused: tuple[str, ...] = ()

    def empty(self) -> ImagePromptAdapter:
        """Return the module without weights. Raises UnknownArchitecture if the file's tensors do not fit the class."""
        given = {
            "kind": self.kind, "arguments": self.arguments, "layers": list(self.layers), "biased": self.biased,
        }  # fmt: skip
        try:
            module = empty_module(ImagePromptAdapter, given)
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"recognised as {self.kind.title}, but with impossible sizes: {error}") from error
        assert isinstance(module, ImagePromptAdapter)
        if difference := differing_keys(self.key_map, module):
            raise UnknownArchitecture(f"recognised as {self.kind.title}, but {difference}")
        return module

    def build(self, tensors: Mapping[str, Tensor]) -> ImagePromptAdapter:
        """Return the module over `tensors` (keys as in the file), in evaluation mode. Raises as `empty`."""
        module = self.empty()
        fill(module, self.key_map.load(tensors))
        assert_filled(module)
        return module

    @property
    def tokens(self) -> int:
        """Tokens of one image; 0 if they are one for each state."""
        found = self.arguments
        given = found.get("num_image_text_embeds") or found.get("num_queries") or found.get("num_tokens")
        return int(given or 0)

    @property
    def state_width(self) -> int:
        """Width of the states of the vision encoder that it reads; 0 if it reads none."""
        if self.kind.use is None:
            return 0
        found = self.arguments
        names = ("redux_dim", "image_embed_dim", "embed_dims")
        if self.kind.reads_face:
            return int(found["hidden_dims"])
        return int(next(found[name] for name in names if name in found))

    @property
    def face_width(self) -> int:
        """Width of the face embedding that it reads; 0 if it reads none."""
        found = self.arguments
        return int(found.get("id_embeddings_dim") or found["image_embed_dim"]) if self.kind.reads_face else 0

    @property
    def text_width(self) -> int:
        """Width of its tokens and of the text that the diffusion model reads."""
        return int(self.arguments["txt_in_features"]) if self.kind.appends else self.layers[0][1]


def plan_adapter(shapes: Mapping[str, Shape]) -> AdapterPlan:
    """Return how to build the image prompt adapter among `shapes`. Raises UnknownArchitecture if there is none."""
    projection, layers = split_names(shapes)
    named = {name: tuple(shapes[key]) for name, key in projection.items()}
    kind = prompt_kind_among(named, layers.of_blocks)
    used = {*projection.values(), *(key for pair in (*layers.weights, *layers.biases) for key in pair)}

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = named_projection(kind, {name: tensors[key] for name, key in projection.items()})
        found = {f"projection.{name}": tensor for name, tensor in found.items()}
        for part, pairs in (("weight", layers.weights), ("bias", layers.biases)):
            for place, (key, value) in enumerate(pairs):
                found[f"to_k.{place}.{part}"], found[f"to_v.{place}.{part}"] = tensors[key], tensors[value]
        return found

    try:
        arguments = kind.arguments(named)
        widths = tuple((int(shapes[key][0]), int(shapes[key][1])) for key, _ in layers.weights)
        key_map = discover({key: tuple(shapes[key]) for key in shapes if key in used}, convert)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as {kind.title}, but with unexpected tensors: {error!r}") from error
    # the LoRA that files of FaceID include is published as a file of its own, too
    rest = (key for key in shapes if key not in used and _INCLUDED_LORA not in key)
    unused = (*rest, *key_map.unused)
    return AdapterPlan(kind, arguments, widths, bool(layers.biases), key_map, unused)
