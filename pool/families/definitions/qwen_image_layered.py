"""Qwen-Image layered: splits an image into transparent layers. Torch-free.

Its latents, in order: the complete image, each layer, the given image. Its autoencoder has a channel of transparency.
The pipeline has its text encoder describe the image if the prompt is empty; here, an empty prompt stays empty.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.families.definitions import qwen_image
from modelpool.pool.families.parts import vocabulary as fam

(_IMAGE,) = qwen_image.FAMILIES

FAMILIES = (
    replace(
        _IMAGE,
        name="qwen_image_layered",
        title="Qwen-Image layered",
        detect=replace(_IMAGE.detect, when=fam.having(layered=True)),
        build=replace(_IMAGE.build, optional_inputs=frozenset({"context_mask"})),
        text=replace(_IMAGE.text, set_name="qwen_image", vision=None),
        latent="qwen_image_layered",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift_by_size=fam.ExponentByRoot(256), last_share=0.02),
            reads=frozenset({"context", "reference", "context_mask"}),
            needs_reference=True,
            side_multiple=32,
            patch_side=16,
            reference_covers=True,
            video=fam.VideoFacts(
                # a frame is a layer; the complete image is sampled before them
                frames=4,
                multiple=1,
                rate=1.0,
                unseen=1,
                layers=True,
            ),
            defaults=fam.SamplingDefaults(
                steps=50, cfg=4.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            not_divided="its layers are made from an image that the model reads",
        ),
        size=(640, 640),
        sources="diffusers' QwenImageLayeredPipeline, which optionally rescales each patch to its norm before "
        "guidance: the complete image and four layers, of 640 or 1024 pixels a side; last level of Qwen-Image",
        folder=replace(
            _IMAGE.folder,
            pipeline="QwenImageLayeredPipeline",
            missing={"processor": "a checkpoint has none, expected the processor of Qwen/Qwen-Image-Layered"},
        ),
        options=replace(_IMAGE.options, controlnets=""),
    ),
)
