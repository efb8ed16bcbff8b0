"""`OpenControlNet`: a ControlNet's file, mapped and built, with its sizes, as `pool.open_model` has a checkpoint's.

What the engine runs and what the catalog describes come from here. Nothing is read until it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pool.checkpoints.mapped_file import MappedFile
from pool.controlnets.build import plan_controlnet
from pool.controlnets.needs import usual_call
from pool.devices.capabilities import DeviceCapabilities, capabilities_of
from pool.errors import UnknownArchitecture, unusable_field
from pool.open_model import OpenModel, form_of
from pool.patches.patch_set import PatchSet
from pool.sizing import component_spec, component_use, own_weights
from pool.spec import ComponentSpec, ComponentUse, Role
from pool.work import ControlRef, control_key


class OpenControlNet:
    """One ControlNet."""

    def __init__(self, ref: ControlRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as of `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        mapped = MappedFile.open(Path(ref.path), allow_pickle=True)  # whoever made the reference has allowed it
        try:
            self.module: Any = plan_controlnet(mapped.header.shapes).build(mapped.tensors())
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{ref.path}: {error}") from None
        self.key = control_key(ref)
        self.weights = tuple(own_weights(self.module))
        self.form = form_of(Role.CONTROLNET, self.weights, capabilities_of(device))

    def spec(self) -> ComponentSpec:
        """Its sizes."""
        return component_spec(self.key, Role.CONTROLNET, self.weights, self.form)

    def use(self, passes: int = 1) -> ComponentUse:
        """What a run needs of it."""
        return component_use(self.key, self.weights, self.form, PatchSet(), passes)

    def usual_call(self) -> Callable[[nn.Module], object]:
        """One call of a usual size, with inputs on the meta device, for dry runs."""
        return usual_call(self.form.compute_dtype)

    def check_fits(self, model: OpenModel) -> None:
        """Raise UnusableField unless it was made for diffusion models like that of `model`."""
        built: Any = model.component(Role.DIFFUSION_MODEL).built.module
        own, unet = self.module.config, built.config
        if not {"block_out_channels", "cross_attention_dim"} <= set(unet):
            title = model.checkpoint.family.title
            raise unusable_field("controls", f"ControlNet {self.ref.name!r}", f"none: {title} has no UNet to speak to")
        found = {"latent channels": own.get("in_channels"), "picture channels": own.get("conditioning_channels")}
        # models that are shown a picture beside their latent read more channels than it has
        expected = {"latent channels": model.latent.channels, "picture channels": 3}
        found, expected = {**found, **_kind(own)}, {**expected, **_kind(unet)}
        # one without attention reads no text
        found["text width"] = found["text width"] if own.get("cross_attention_dim") else expected["text width"]
        if found != expected:
            words = [", ".join(f"{name} {value}" for name, value in kind.items()) for kind in (found, expected)]
            what = f"one for models like {model.ref.name!r} ({words[1]})"
            raise unusable_field("controls", f"ControlNet {self.ref.name!r} ({words[0]})", what)


def _kind(config: Any) -> dict[str, Any]:
    """What a ControlNet and the model that it speaks to have in common."""
    return {
        "channels": list(config["block_out_channels"]),
        "blocks at each size": config["layers_per_block"],
        "text width": config.get("cross_attention_dim"),
        "numbers beside the text": config.get("projection_class_embeddings_input_dim") or 0,
    }
