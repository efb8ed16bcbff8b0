"""Whether a ControlNet was made for a diffusion model, and which of its modes is meant. Pure functions over built
modules; every complaint names a field of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from modelpool.pool.controlnets.inpainting import INPAINT, PLAIN, says_hole
from modelpool.pool.controlnets.kinds import ControlKind
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.specs.spec import Role

#: what a ControlNet and the model that it speaks to have in common, in words
Traits: TypeAlias = Mapping[str, Any]
#: a mask's, of those that are told a hole; others have none
_BESIDE = "channels beside the image"


def check_fits(name: str, kind: ControlKind, control: nn.Module, model: OpenModel) -> None:
    """Raise UnusableField unless the ControlNet `name` was made for diffusion models like that of `model`."""
    family = model.checkpoint.family
    if family.sampling.model not in kind.models:
        if "" in kind.models:
            raise unusable_field(
                "controls", f"ControlNet {name!r}", f"none: {family.title} has no UNet for it to speak to"
            )
        found = f"ControlNet {name!r} for {kind.title}"
        raise unusable_field("controls", found, f"one for models like {model.ref.name!r} ({family.title})")
    built = model.component(Role.DIFFUSION_MODEL).built.module
    if "" in kind.models:
        found_traits, expected_traits = _of_unets(control, built, model.latent.channels)
    else:
        found_traits, expected_traits = _of_transformers(kind, control, built, model.latent.channels)
    if found_traits != expected_traits:
        words = [
            ", ".join(f"{key} {value}" for key, value in traits.items()) for traits in (found_traits, expected_traits)
        ]
        what = f"one for models like {model.ref.name!r} ({words[1]})"
        raise unusable_field("controls", f"ControlNet {name!r} ({words[0]})", what)


def mode_of(name: str, kind: ControlKind, control: nn.Module, said: str | int | None) -> int | None:
    """The number of the mode that a request means; None for a ControlNet that has one alone. Raises UnusableField for
    one that has several and is told none, and for a mode that it does not have."""
    count = kind.mode_count(control)
    if count is None:
        if said is not None and not (says_hole(kind) and said in (INPAINT, PLAIN)):
            words = f"{INPAINT}, {PLAIN} or nothing" if says_hole(kind) else "nothing"
            raise unusable_field("controls.mode", said, f"{words}: ControlNet {name!r} has one mode")
        return None
    names = kind.modes[:count]
    number = names.index(said) if said in names else said
    if not isinstance(number, int) or not 0 <= number < count:
        found = "nothing" if said is None else said
        expected = f"a mode of ControlNet {name!r}: {', '.join(names)}, or a number from 0 to {count - 1}"
        raise unusable_field("controls.mode", found, expected)
    return number


def _of_unets(control: Any, unet: Any, channels: int) -> tuple[Traits, Traits]:
    own = control.config
    # models that are shown an image beside their latent read more channels than it has
    found = {"latent channels": own.get("in_channels"), "image channels": own.get("conditioning_channels")}
    found, expected = (
        {**found, **_kind(own)},
        {"latent channels": channels, "image channels": 3, **_kind(unet.config)},
    )
    # one without attention reads no text
    found["text width"] = found["text width"] if own.get("cross_attention_dim") else expected["text width"]
    return found, expected


def _kind(config: Any) -> dict[str, Any]:
    return {
        "channels": list(config["block_out_channels"]),
        "blocks at each size": config["layers_per_block"],
        "text width": config.get("cross_attention_dim"),
        "numbers beside the text": config.get("projection_class_embeddings_input_dim") or 0,
    }


def _of_transformers(kind: ControlKind, control: Any, model: Any, channels: int) -> tuple[Traits, Traits]:
    own = control.config
    found = {"latent channels": kind.latent_channels(control), **_sizes(own)}
    beside = kind.beside_channels(control)
    expected = {"latent channels": channels, **_sizes(model.config), _BESIDE: kind.patch if beside else 0}
    if "transformer_num_layers" in own:  # each of its samples is for one block
        found["blocks"], expected["blocks"] = own["transformer_num_layers"], model.config["num_layers"]
    found[_BESIDE] = beside
    # one that reads no text fits beside every one
    found["text width"] = found["text width"] or expected["text width"]
    return found, expected


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "width": config.get("dim") or config["num_attention_heads"] * config["attention_head_dim"],
        "text width": config.get("joint_attention_dim") or config.get("cross_attention_dim"),
        "pooled text width": config.get("pooled_projection_dim") or 0,
    }
