"""Build a text encoder from the tensors of its file: plan from shapes, fill with tensors, save back.

Joins recognition, key map, configuration and module, like `pool.models.components.vae.build_vae`. Copies nothing. Does
not know where files are, nor how a text is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from modelpool.pool.families.detection.text_encoders import (
    INSIDE,
    SIGNATURES,
    TextEncoderFacts,
    recognise_text_encoder,
    stands_for,
)
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.text.configs import CONFIGS, Config, count
from modelpool.pool.models.components.text.text_encoder_classes import empty_text_encoder, fill_tables
from modelpool.pool.models.components.text.text_encoder_names import CONVERTERS, convert_without_norm, in_known_naming
from modelpool.pool.values.core.errors import UnknownArchitecture, counted, unknown_name
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

#: distinguishes UMT5 from T5 if recognition saw only a part of the keys: positions in every layer
_UMT5_POSITIONS = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
#: the first layers of a language model, as in files for Flux 2
FIRST_LAYERS = "mistral3_24b_pruned"
#: their number (the last one that Flux 2 reads), and the optional norm
_FIRST_LAYERS = 30
_LAST_NORM = "model.norm.weight"
#: the second name of T5's token embedding
_SECOND_NAME = "encoder.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class TextEncoderPlan(ModulePlan):
    """The plan for building the text encoder in a file.

    facts    its facts
    config   the arguments of its configuration
    prefix   its key prefix in the file
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    facts: TextEncoderFacts
    config: Config
    prefix: str
    key_map: KeyMap

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        module = empty_text_encoder(self.facts.architecture, self.config)
        if self.facts.name == FIRST_LAYERS:
            module.norm = nn.Identity()  # its last state is read before the norm
        return module, fitted(self.key_map, module, f"recognised as {self.facts.title}, but", _carried(module))

    def complete(self, module: nn.Module) -> None:
        """See `ModulePlan.complete`."""
        fill_tables(module)


def plan_text_encoder(
    shapes: Mapping[str, Shape], prefix: str = "", *, facts: TextEncoderFacts | None = None
) -> TextEncoderPlan:
    """Plan the text encoder among `shapes` with key prefix `prefix`, from shapes alone.

    `facts` overrides recognition: the encoder in this role of a model, whatever its size.

    Raises UnknownArchitecture for an unknown text encoder, and for a known one with other tensors.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    bare = in_known_naming({key.removeprefix(prefix): shape for key, shape in own.items()})
    found = facts or recognise_text_encoder(bare)
    if found is None:
        first = ", ".join(list(bare)[:3]) or "none"
        matching = counted(len(bare), "tensor matches", "tensors match")
        raise UnknownArchitecture(f"text encoder: its {matching} no known text encoder (the first are {first})")
    if found.architecture == "t5" and _UMT5_POSITIONS in bare:
        found = replace(found, architecture="umt5")
    if found.name in stands_for(FIRST_LAYERS) and _are_first_layers(bare):
        found = facts_named(FIRST_LAYERS)
    convert = CONVERTERS[found.architecture, found.layout]
    if found.name == FIRST_LAYERS:
        convert = convert_without_norm
    try:
        key_map = discover(own, lambda tensors: convert({k.removeprefix(prefix): x for k, x in tensors.items()}))
        named = {key.removeprefix("text_model."): shape for key, shape in key_map.shapes.items()}
        config = CONFIGS[found.architecture](found, named)
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as {found.title}, but with other tensors: {error}") from error
    measured = replace(
        found,
        width=config.get("hidden_size") or config["d_model"],
        layers=config.get("num_hidden_layers") or config["num_layers"],
        vocabulary=config["vocab_size"],
    )
    return TextEncoderPlan(measured, config, prefix, key_map)


def _are_first_layers(bare: Mapping[str, Shape]) -> bool:
    """Return whether a language model is truncated to its first layers, by its size, or by their number and a missing
    norm."""
    seen = recognise_text_encoder(bare)
    if seen is not None:
        return seen.name == FIRST_LAYERS
    return _LAST_NORM not in bare and count(bare, r"model\.layers\.(\d+)\.") == _FIRST_LAYERS


def facts_named(name: str, layout: str = "transformers") -> TextEncoderFacts:
    """Return the facts of the text encoder `name` ("t5xxl") without a file, for models of other sizes than published.

    Raises UnknownName.
    """
    known = (*(signature.facts for signature in SIGNATURES), *INSIDE)
    for facts in known:
        if (facts.name, facts.layout) == (name, layout):
            return facts
    raise unknown_name("text encoder", name, {facts.name for facts in known})


def _carried(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of `module`, each tensor under one name."""
    is_named_twice = hasattr(module, "shared")
    return {key: value for key, value in module.state_dict().items() if not is_named_twice or key != _SECOND_NAME}
