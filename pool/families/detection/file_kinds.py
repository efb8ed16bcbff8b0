"""`FileKind`: what a file of weights is for. Torch-free."""

from __future__ import annotations

from enum import Enum


class FileKind(Enum):
    """The kind of a file of weights. The value is shown to users."""

    CHECKPOINT = "checkpoint"
    DIFFUSION_MODEL = "diffusion model"
    LORA = "LoRA"
    VAE = "VAE"
    TEXT_ENCODER = "text encoder"
    CLIP_VISION = "vision encoder"
    CONTROLNET = "ControlNet"
    IMAGE_PROMPT = "image prompt adapter"
    GLIGEN = "GLIGEN model"
    EMBEDDING = "embedding"
    UPSCALER = "upscaler"
    HYPERNETWORK = "hypernetwork"
