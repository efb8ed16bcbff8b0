"""ControlNets that read the tokens of a model behind each of its blocks, and add to them there.

The architecture of DiffSynth-Studio's blockwise ControlNets for Qwen-Image (Apache-2.0): one layer reads the latent of
the image, and one block for each block of the model reads its tokens and the result of that layer.

Shape legend: B batch, C channels, H W height and width of a latent, N tokens of the image, D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from modelpool.pool.families.parts.patches import packed
from modelpool.pool.inference.conditioning.micro_conditioning import Residuals
from modelpool.pool.inference.controlnets.calls import ControlInputs
from modelpool.pool.weights.options.run_context import current_run
from modelpool.pool.weights.patcher.blocks.overlays import Overlays

#: Source: `BlockWiseControlBlock` of DiffSynth-Studio
_EPSILON = 1e-6
#: the name of the image's tokens among what a call returns: the model reads none of them
TOKENS = "tokens"


class BlockwiseControlBlock(nn.Module):
    """The residual that is added to the tokens of an image behind one block of a model."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.x_rms, self.y_rms = RMSNorm(dim, eps=_EPSILON), RMSNorm(dim, eps=_EPSILON)
        self.input_proj, self.output_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.act = nn.GELU()

    def forward(self, x_BND: Tensor, image_BND: Tensor) -> Tensor:
        """Return the sum for the tokens `x_BND` of the model, from the ones of the control image."""
        joined_BND = self.x_rms(x_BND) + self.y_rms(image_BND)
        added_BND: Tensor = self.output_proj(self.act(self.input_proj(joined_BND)))
        return added_BND


class BlockwiseControlNet(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A ControlNet with a block for each block of a model."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, in_channels: int, num_layers: int, dim: int, extra_condition_channels: int = 0) -> None:
        super().__init__()
        self.img_in = nn.Linear(in_channels + extra_condition_channels, dim)
        self.controlnet_blocks = nn.ModuleList([BlockwiseControlBlock(dim) for _ in range(num_layers)])

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return the tokens of a control image."""
        tokens_BND: Tensor = self.img_in(packed(image_BCHW))
        return tokens_BND

    def added(self, block: int, x_BND: Tensor, image_BND: Tensor) -> Tensor:
        """Return the residual for the tokens `x_BND` behind a block of the model."""
        added_BND: Tensor = self.controlnet_blocks[block](x_BND, image_BND)
        return added_BND


def call_blockwise_control(module: Any, inputs: ControlInputs) -> Residuals:
    """Return the tokens of the control image, which the blocks read."""
    return {TOKENS: (module(inputs.images_BC),)}


def all_layers(module: Any, image_BCHW: Tensor) -> None:
    """Call each layer once, for estimates."""
    tokens_BND = module(image_BCHW)
    for block in range(len(module.controlnet_blocks)):
        module.added(block, tokens_BND, tokens_BND)


#: (number of a block, tokens of the image behind it) -> what is added to them; None: nothing
Added: TypeAlias = Callable[[int, Tensor], Tensor | None]


@contextmanager
def behind_blocks(model: nn.Module, blocks: Sequence[nn.Module], added: Added) -> Iterator[None]:
    """Have `added` called behind each of `blocks` of `model`, in its run inside of the block of code. They return the
    tokens of text and image; the ones of reference images follow the image's, and stay as they are."""
    run = current_run(model)
    assert run is not None, "the model of a run is the current one"
    overlays = Overlays(run)

    def behind(number: int) -> Callable[..., Any]:
        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            text_BLD, image_BND = original(*args, **kwargs)
            found_BND = added(number, image_BND)
            if found_BND is None:
                return text_BLD, image_BND
            changed_BND = image_BND.clone()
            changed_BND[:, : found_BND.shape[1]] += found_BND
            return text_BLD, changed_BND

        return forward

    try:
        for number, block in enumerate(blocks):
            overlays.put(block, behind(number))
        yield
    finally:
        overlays.remove()
