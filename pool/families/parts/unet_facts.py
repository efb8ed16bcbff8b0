"""What the families of UNets share: conditions that distinguish them at any size, facts about their layers that no
shape tells, and their places in files and folders. Torch-free.

The conditions know the fields that `unet_layouts` measures. Exact sizes, which distinguish the published relatives of a
family, are in its module.
"""

from __future__ import annotations

from modelpool.pool.families.detection.layouts.shape_sizes import Config, Value
from modelpool.pool.families.detection.layouts.signature import Condition, having
from modelpool.pool.families.parts.forward import Shapes
from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.families.parts.pipeline_form import NOTHING, PipelineFacts
from modelpool.pool.values.specs.spec import Role

#: heads of attention at every width if its projections are convolutions; else the width of a head
SD1_HEADS, UNET_HEAD_WIDTH = 8, 64
#: embedding width of each micro-conditioning number
NUMBER_WIDTH = 256
MAX_NORM_GROUPS = 32
#: key prefixes in single files, and how the parts are built
UNET_PREFIX, VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
#: the same, of the projection of an image embedding and the numbers of a view; its folder has this name too
VIEW_PREFIX = "cc_projection."
UNET_AND_VAE = {Role.DIFFUSION_MODEL: Architecture.LDM_UNET, Role.VAE: Architecture.VAE}
#: folders of a pipeline, and the pipelines of models that read one text encoder. Source for all pipelines of UNets:
#: model_index.json of the published folders
UNET_FOLDERS = {Role.DIFFUSION_MODEL: "unet", Role.VAE: "vae"}
PLAIN_PIPELINE = PipelineFacts(
    "StableDiffusionPipeline",
    {Role.TEXT_ENCODER: "text_encoder", **UNET_FOLDERS},
    {
        "safety_checker": NOTHING,
        "feature_extractor": NOTHING,
        "image_encoder": NOTHING,
        "requires_safety_checker": False,
    },
)


def sd1(**fields: Value) -> Condition:
    """Return the condition for UNets of Stable Diffusion 1: convolutional projections, and only text conditioning."""
    return _still(linear=False, labelled=False, **fields)


def sd2(**fields: Value) -> Condition:
    """Return the condition for UNets of Stable Diffusion 2: as the first, with linear projections."""
    return _still(linear=True, labelled=False, **fields)


def unclip(**fields: Value) -> Condition:
    """Return the condition for UNets of Stable Diffusion 2 with vector conditioning."""
    return _still(linear=True, labelled=True, **fields)


def sdxl(**fields: Value) -> Condition:
    """Return the condition for UNets like SDXL's: vector conditioning, and no attention at the first level."""
    own = unclip(**fields)
    return lambda config: own(config) and depths(config)[:1] == (0,)


def refiner(config: Config) -> bool:
    """Match SDXL's refiner: no attention at the last level either."""
    return sdxl()(config) and depths(config)[-1:] == (0,)


def video(**fields: Value) -> Condition:
    """Return the condition for UNets with temporal attention, as Stable Video Diffusion's."""
    return having(use_temporal_attention=True, **fields)


def depths(config: Config) -> tuple[Value, ...]:
    """Return the transformer blocks after each residual block of the down path."""
    found = config["transformer_depth"]
    assert isinstance(found, tuple), config
    return found


def _still(linear: bool, labelled: bool, **fields: Value) -> Condition:
    own = having(use_temporal_attention=False, use_linear_in_transformer=linear, **fields)
    return lambda config: (
        own(config)
        # not a model without text input
        and config["context_dim"] is not None
        and (config["adm_in_channels"] is not None) is labelled
    )


def count(shapes: Shapes, beginning: str) -> int:
    """Return how many numbers follow `beginning` in keys."""
    return len({key.removeprefix(beginning).partition(".")[0] for key in shapes if key.startswith(beginning)})


def widths(shapes: Shapes, convolution: str) -> tuple[int, ...]:
    """Return the width of each level, by the first convolution of its residual blocks."""
    levels = count(shapes, "down_blocks.")
    return tuple(shapes[f"down_blocks.{level}.resnets.0.{convolution}.weight"][0] for level in range(levels))
