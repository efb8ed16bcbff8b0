"""Qwen-Image layered: splits an image into transparent layers. Torch-free.

Its latents are those of the complete image and of each layer, one after the other, before that of the given image. Its
autoencoder has a channel of transparency. The pipeline has its text encoder describe the image if the prompt is empty;
here, an empty prompt stays empty.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.families.definitions import qwen_image
from modelpool.pool.families.detection.layouts.signature import having
from modelpool.pool.families.parts.model_facts import image_flow
from modelpool.pool.values.core.sampling_facts import CfgRescale, ExponentByRoot, Guidance, NoiseFacts, NoiseKind

(_IMAGE,) = qwen_image.FAMILIES

FAMILIES = (
    replace(
        _IMAGE,
        name="qwen_image_layered",
        title="Qwen-Image layered",
        when=having(layered=True),
        latent="qwen_image_layered",
        text=replace(_IMAGE.text, set_name="qwen_image", vision=None),
        reference_covers=True,
        facts=image_flow(
            NoiseFacts(NoiseKind.FLOW, shift_by_size=ExponentByRoot(256), last_share=0.02),
            Guidance.CLASSIFIER_FREE,
            cfg=4.0,
            steps=50,
            width=640,
            height=640,
            side_multiple=32,
            patch_side=16,
            # a frame is a layer; the complete image is sampled before them
            frames=4,
            frame_multiple=1,
            frame_rate=1.0,
            unseen_cells=1,
            layers=True,
            reads=("context", "reference"),
            may_read=("context_mask",),
            sources="diffusers' QwenImageLayeredPipeline, which optionally rescales each patch to its norm before "
            "guidance: the complete image and four layers, of 640 or 1024 pixels a side; last level of Qwen-Image",
        ),
        cfg_rescale=CfgRescale.NOTHING,
        controlnets="",
        folder=replace(
            _IMAGE.folder,
            pipeline="QwenImageLayeredPipeline",
            missing={"processor": "a checkpoint has none, expected the processor of Qwen/Qwen-Image-Layered"},
        ),
    ),
)
