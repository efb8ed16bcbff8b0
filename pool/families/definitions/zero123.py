"""Zero123 and Stable Zero123: UNets of Stable Diffusion 1 that show the object of an image from another view, and read
no text. Torch-free.

The embedding of the image by CLIP L and four numbers of the view are projected to one state ("cc_projection"), which
the UNet reads in the place of a text; the latent of the image is concatenated. The unguided prediction sees neither.

Sources: cvlab-columbia/zero123, `sample_model` of gradio_new.py; stabilityai/stable-zero123, whose number of the
distance is the angle of the image's camera from straight above.
"""

from __future__ import annotations

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts.unet_facts import UNET_AND_VAE, UNET_PREFIX, VAE_PREFIX, VIEW_PREFIX, sd1
from modelpool.pool.families.parts.vocabulary import (
    LATENT_FORMATS,
    UNET,
    Architecture,
    Detection,
    FolderMark,
    Guidance,
    ImageConcat,
    LocatedFamily,
    Role,
    SamplingDefaults,
    SamplingFacts,
    TextInputs,
    UNetDefinition,
    VisionEncoderUse,
)

ZERO123 = LocatedFamily(
    name="zero123",
    title="Zero123",
    prefixes={
        Role.VISION_ENCODER: "cond_stage_model.model.visual.",
        Role.DIFFUSION_MODEL: UNET_PREFIX,
        Role.VAE: VAE_PREFIX,
    },
    architectures={Role.VISION_ENCODER: Architecture.VISION_MODEL, **UNET_AND_VAE},
    texts={},
    native_pixels=256,
    scaling_factor=LATENT_FORMATS["sd1"].scale,
    latent_format="sd1",
    extra_prefixes={Role.DIFFUSION_MODEL: (VIEW_PREFIX,)},
    sampling=SamplingFacts(
        reads=frozenset({"image_context", "view"}),
        image_concat=ImageConcat.UNSCALED,
        vision_use=VisionEncoderUse.PROJECTED,
        defaults=SamplingDefaults(50, 3.0, "euler", "normal", Guidance.CLASSIFIER_FREE),
    ),
)

FAMILIES = (
    UNetDefinition(
        family=ZERO123,
        detect=Detection(LDM_UNET, sd1(in_channels=8), "Stable_Zero123", extra_keys=(f"{VIEW_PREFIX}weight",)),
        module="UNet2DConditionModel",
        latent="sd1",
        text=TextInputs(()),
        lora=UNET,
        folder_mark=FolderMark("sd1_ip2p", folder=VIEW_PREFIX.removesuffix(".")),
        vision_encoder="clip_vision_l",
        # diffusers has no pipeline for it: folders cannot be saved
        pipeline=None,
    ),
)
