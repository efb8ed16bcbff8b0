"""Factors of an image prompt by block of a model, as InstantStyle uses them. Torch-free and pure.

Blocks are named as in diffusers: "down.2", "mid", "up.0", or with the attention in it, "up.0.1"; Flux has blocks
"double.3" and "single.7". Source: `set_ip_adapter_scale` of diffusers: its {"up": {"block_0": [0.0, 1.0, 0.0]}} is
{"up.0.1": 1.0} here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAME = re.compile(r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.attentions\.(\d+)\.")
_BLOCK_OF_FLUX = re.compile(r"(?:double|single)\.\d+")
#: what a block may be called in a request
BLOCK = re.compile(rf"(?:(?:down|up)\.\d+|mid)(?:\.\d+)?|{_BLOCK_OF_FLUX.pattern}")


def block_factor(factors: Sequence[tuple[str, float]], module: str) -> float:
    """Return the factor of the attention `module` (its name in diffusers' UNet, or the block of Flux, as named here):
    its attention's factor, or its block's; 0 if neither is named, and 1 without any `factors`."""
    if not factors:
        return 1.0
    if _BLOCK_OF_FLUX.fullmatch(module):
        return dict(factors).get(module, 0.0)
    match = _NAME.match(module)
    if match is None:
        return 0.0
    block = match[3] or f"{match[1]}.{match[2]}"
    known = dict(factors)
    return known.get(f"{block}.{match[4]}", known.get(block, 0.0))
