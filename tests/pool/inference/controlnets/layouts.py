"""Key and shape lists of ControlNets in their published layout: the half of a UNet that goes down, with a convolution
behind each of its outputs, and a small network that brings an image to the size of a latent."""

from __future__ import annotations

import itertools

from tests.pool.models.loading.layouts import Layout, LdmUnet, conv, ldm_unet

#: the halves of a UNet that a ControlNet has
_SHARED = ("time_embed.", "input_blocks.", "middle_block.", "label_emb.")


def ldm_controlnet(unet: LdmUnet, prefix: str = "control_model.", widths: tuple[int, ...] = (4, 8, 8, 16)) -> Layout:
    """A ControlNet for `unet`, as its code of origin has it. `widths` are of the image, size by size."""
    layout: Layout = {key: shape for key, shape in ldm_unet(unet, "").items() if key.startswith(_SHARED)}
    outputs: dict[int, int] = {}
    for key, shape in layout.items():
        if key.startswith("input_blocks.") and key.endswith(("out_layers.3.weight", "0.op.weight", ".0.0.weight")):
            outputs[int(key.split(".")[1])] = shape[0]
    for number, channels in sorted(outputs.items()):
        conv(layout, f"zero_convs.{number}.0", channels, channels, 1)
    middle = max(outputs)
    conv(layout, "middle_block_out.0", outputs[middle], outputs[middle], 1)
    channels = [3, widths[0]]
    for narrow, wide in itertools.pairwise(widths):
        channels += [narrow, wide]
    channels.append(unet.model_channels)
    for place, (before, after) in enumerate(itertools.pairwise(channels)):
        conv(layout, f"input_hint_block.{2 * place}", after, before)
    return {prefix + key: shape for key, shape in layout.items()}
