"""Checks that a ControlNet fits a diffusion model, and resolves its mode. Pure functions of built modules; every error
names a field of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from modelpool.pool.inference.controlnets.cascade_controlnets import BLOCKS, residual_blocks
from modelpool.pool.inference.controlnets.controlnet_kinds import ControlKind
from modelpool.pool.inference.controlnets.inpainting_controlnets import INPAINT, PLAIN, is_inpaint_by_request
from modelpool.pool.inference.controlnets.t2i_adapters import feature_sizes, sizes_read, title_of
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.specs.spec import Role

#: properties that a ControlNet and its model must share, in words
Traits: TypeAlias = Mapping[str, Any]
#: channels of the mask of inpainting ControlNets
_MASK_CHANNELS = "mask channels"


def check_fits(name: str, kind: ControlKind, control: nn.Module, model: OpenModel) -> None:
    """Raise UnusableField unless the ControlNet `name` is for diffusion models like `model`'s."""
    family = model.checkpoint.family
    if family.sampling.model not in kind.models:
        if "" in kind.models:
            reason = f"ControlNet {name!r} is for UNets, and {family.title} has none"
            raise UnusableField(f"controls: not supported by model {model.ref.name!r}; {reason}")
        found = f"ControlNet {name!r} for {kind.title}"
        raise unusable_field("controls", found, f"a ControlNet for models like {model.ref.name!r} ({family.title})")
    built = model.component(Role.DIFFUSION_MODEL).built.module
    if kind.is_blockwise:
        _check_blocks(name, kind, control, model)
        return
    if kind.cell_side:
        _check_projections(name, control, built, model)
        return
    if kind.reads_image_only:
        _check_features(name, control, built, model)
        return
    if "" in kind.models:
        found_traits, expected_traits = _of_unets(control, built, model.latent.channels)
    else:
        found_traits, expected_traits = _of_transformers(kind, control, built, model.latent.channels)
    if found_traits != expected_traits:
        words = [
            ", ".join(f"{key} {value}" for key, value in traits.items()) for traits in (found_traits, expected_traits)
        ]
        what = f"a ControlNet for models like {model.ref.name!r} ({words[1]})"
        raise unusable_field("controls", f"ControlNet {name!r} ({words[0]})", what)


def _check_features(name: str, adapter: Any, unet: Any, model: OpenModel) -> None:
    """Raise UnusableField unless the features of a T2I-Adapter are those that the UNet of `model` reads."""
    found, read = feature_sizes(adapter.config), sizes_read(unet.config)
    # the last feature, for the middle block, is optional
    if found != read[: len(found)] or len(found) < len(read) - 1:
        sizes = [", ".join(f"{width} channels at 1/{cells}" for width, cells in each) for each in (found, read)]
        what = f"a T2I-Adapter for models like {model.ref.name!r} ({model.checkpoint.family.title}: {sizes[1]})"
        raise unusable_field("controls", f"T2I-Adapter {name!r} for {title_of(adapter.config)} ({sizes[0]})", what)


def _check_projections(name: str, control: Any, unet: Any, model: OpenModel) -> None:
    """Raise UnusableField unless stage C has the blocks before which projections of a ControlNet are added, of their
    width."""
    found = {"blocks": BLOCKS, "width": control.config.dim}
    widths = sorted(set(unet.config.block_out_channels))
    expected = {"blocks": len(residual_blocks(unet)), "width": " and ".join(map(str, widths))}
    if found["blocks"] == expected["blocks"] and widths == [control.config.dim]:
        return
    words = [", ".join(f"{key} {value}" for key, value in traits.items()) for traits in (found, expected)]
    what = f"a ControlNet for models like {model.ref.name!r} ({words[1]})"
    raise unusable_field("controls", f"ControlNet {name!r} ({words[0]})", what)


def _check_blocks(name: str, kind: ControlKind, control: Any, model: OpenModel) -> None:
    """Raise UnusableField unless a ControlNet has a block for each block of `model`, of their width."""
    built: Any = model.component(Role.DIFFUSION_MODEL).built.module
    config, (attribute,) = built.config, kind.blocks.values()
    found = {"blocks": control.config.num_layers, "width": control.config.dim}
    expected = {
        "blocks": len(getattr(built, attribute)),
        "width": config["num_attention_heads"] * config["attention_head_dim"],
    }
    extra = kind.extra_channels(control)
    if found == expected and extra in (0, kind.patch):
        return
    found[_MASK_CHANNELS], expected[_MASK_CHANNELS] = extra, kind.patch if extra else 0
    words = [", ".join(f"{key} {value}" for key, value in traits.items()) for traits in (found, expected)]
    what = f"a ControlNet for models like {model.ref.name!r} ({words[1]})"
    raise unusable_field("controls", f"ControlNet {name!r} ({words[0]})", what)


def mode_of(name: str, kind: ControlKind, control: nn.Module, requested: str | int | None) -> int | None:
    """Return the number of the requested mode; None for a ControlNet with a single mode. Raises UnusableField if it has
    several and none is requested, and for an unknown mode."""
    count = kind.mode_count(control)
    if count is None:
        if requested is not None and not (is_inpaint_by_request(kind) and requested in (INPAINT, PLAIN)):
            expected = f"{INPAINT!r}, {PLAIN!r} or no mode" if is_inpaint_by_request(kind) else "no mode"
            raise unusable_field("controls.mode", requested, f"{expected}: ControlNet {name!r} has a single mode")
        return None
    names = kind.modes[:count]
    number = names.index(requested) if requested in names else requested
    if not isinstance(number, int) or not 0 <= number < count:
        modes = f"a mode of ControlNet {name!r}: {', '.join(names)}, or a number from 0 to {count - 1}"
        if requested is None:
            raise UnusableField(f"controls.mode: missing; set it to {modes}")
        raise unusable_field("controls.mode", requested, modes)
    return number


def _of_unets(control: Any, unet: Any, channels: int) -> tuple[Traits, Traits]:
    config = control.config
    # models with concatenated image inputs read more channels than the latent has
    found = {"latent channels": config.get("in_channels"), "image channels": config.get("conditioning_channels")}
    found, expected = (
        {**found, **_kind(config)},
        {"latent channels": channels, "image channels": 3, **_kind(unet.config)},
    )
    # without attention it reads no text
    found["text width"] = found["text width"] if config.get("cross_attention_dim") else expected["text width"]
    return found, expected


def _kind(config: Any) -> dict[str, Any]:
    return {
        "channels": list(config["block_out_channels"]),
        "blocks at each size": config["layers_per_block"],
        "text width": config.get("cross_attention_dim"),
        "micro-conditioning width": config.get("projection_class_embeddings_input_dim") or 0,
    }


def _of_transformers(kind: ControlKind, control: Any, model: Any, channels: int) -> tuple[Traits, Traits]:
    config = control.config
    found = {"latent channels": kind.latent_channels(control), **_sizes(config)}
    extra = kind.extra_channels(control)
    expected = {"latent channels": channels, **_sizes(model.config), _MASK_CHANNELS: kind.patch if extra else 0}
    if "transformer_num_layers" in config:  # each of its residuals is for one block
        found["blocks"], expected["blocks"] = config["transformer_num_layers"], model.config["num_layers"]
    found[_MASK_CHANNELS] = extra
    # without text input it fits any text width
    found["text width"] = found["text width"] or expected["text width"]
    return found, expected


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "width": config.get("dim") or config["num_attention_heads"] * config["attention_head_dim"],
        "text width": config.get("joint_attention_dim") or config.get("cross_attention_dim"),
        "pooled text width": config.get("pooled_projection_dim") or 0,
    }
