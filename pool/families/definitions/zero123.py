"""Zero123 and Stable Zero123: UNets of Stable Diffusion 1 that show the object of an image from another view, and read
no text. Torch-free.

The embedding of the image by CLIP L and four numbers of the view are projected to one state ("cc_projection"), which
the UNet reads in the place of a text; the latent of the image is concatenated. The unguided prediction sees neither.

Sources: cvlab-columbia/zero123, `sample_model` of gradio_new.py; stabilityai/stable-zero123, where the number of the
distance is the angle of the image's camera from straight above.
"""

from __future__ import annotations

from modelpool.pool.families.detection.layouts.unet_layouts import LDM_UNET
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.unet_facts import UNET_AND_VAE, UNET_PREFIX, VAE_PREFIX, VIEW_PREFIX, sd1

ZERO123 = fam.LocatedFamily(
    name="zero123",
    title="Zero123",
    prefixes={
        fam.Role.VISION_ENCODER: "cond_stage_model.model.visual.",
        fam.Role.DIFFUSION_MODEL: UNET_PREFIX,
        fam.Role.VAE: VAE_PREFIX,
    },
    architectures={fam.Role.VISION_ENCODER: fam.Architecture.VISION_MODEL, **UNET_AND_VAE},
    texts={},
    native_pixels=256,
    scaling_factor=fam.LATENT_FORMATS["sd1"].scale,
    latent_format="sd1",
    extra_prefixes={fam.Role.DIFFUSION_MODEL: (VIEW_PREFIX,)},
    sampling=fam.SamplingFacts(
        reads=frozenset({"image_context", "view"}),
        image_concat=fam.ImageConcat.UNSCALED,
        vision_use=fam.VisionEncoderUse.PROJECTED,
        defaults=fam.SamplingDefaults(50, 3.0, "euler", "normal", fam.Guidance.CLASSIFIER_FREE),
    ),
)

FAMILIES = (
    fam.UNetDefinition(
        family=ZERO123,
        detect=fam.Detection(LDM_UNET, sd1(in_channels=8), "Stable_Zero123", extra_keys=(f"{VIEW_PREFIX}weight",)),
        module="UNet2DConditionModel",
        latent="sd1",
        text=fam.TextInputs(()),
        lora=fam.UNET,
        folder_mark=fam.FolderMark("sd1_ip2p", folder=VIEW_PREFIX.removesuffix(".")),
        vision_encoder="clip_vision_l",
        # diffusers has no pipeline for it: folders cannot be saved
        pipeline=None,
    ),
)
