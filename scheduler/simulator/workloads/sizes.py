"""Invented models of four sizes, after public ones: bytes from parameter counts at two bytes each, estimated seconds.

Seconds are for one data-centre GPU of 2023 (H100); GPUs of other speeds scale them. Published figures name their
source; the others are of the right order of magnitude only.
"""

from __future__ import annotations

from modelpool.pool.values.core.errors import GIB
from modelpool.scheduler.simulator.workloads.models import InventedModel

GB = 10**9
MB = 10**6

#: like Stable Diffusion 1.5 at 512 x 512: text encoder 123, U-Net 860, VAE 84, ControlNet 361 million parameters
SD15 = InventedModel(
    "sd15",
    text_encoder_bytes=246 * MB,
    diffusion_bytes=1720 * MB,
    vae_bytes=168 * MB,
    activation_bytes=1 * GIB,
    encode_seconds=0.01,
    step_seconds=0.02,
    decode_seconds=0.05,
    lora_bytes=150 * MB,
    controlnet_bytes=722 * MB,
    patched_share=0.6,
)

#: like SDXL at 1024 x 1024: text encoders 818, U-Net 2,570, VAE 84, ControlNet 1,250 million parameters. Usual LoRAs
#: patch its transformer blocks, about 2.1 of the 2.57 thousand million
SDXL = InventedModel(
    "sdxl",
    text_encoder_bytes=1636 * MB,
    diffusion_bytes=5140 * MB,
    vae_bytes=168 * MB,
    activation_bytes=3 * GIB,
    encode_seconds=0.03,
    step_seconds=0.07,
    decode_seconds=0.15,
    lora_bytes=300 * MB,
    controlnet_bytes=2500 * MB,
    patched_share=0.8,
)

#: like FLUX.1-dev at 1024 x 1024: T5-XXL's encoder and CLIP-L 4.9, transformer 11.9 thousand million parameters.
#: 28 steps take 6.7 s on one H100 (xDiT), one pass of the text encoders 0.024 s when they are resident (SGLang #25517)
FLUX = InventedModel(
    "flux",
    text_encoder_bytes=9770 * MB,
    diffusion_bytes=23_800 * MB,
    vae_bytes=168 * MB,
    activation_bytes=4 * GIB,
    scratch_bytes=GIB // 2,
    encode_seconds=0.024,
    step_seconds=0.24,
    decode_seconds=0.15,
    lora_bytes=500 * MB,
    controlnet_bytes=6600 * MB,
    patched_share=0.9,
    loras_reach_text=False,
)

#: like Wan 2.1 T2V 14B: UMT5-XXL's encoder 5.7, transformer 14.3 thousand million parameters; a video takes 74.6 s on
#: one H100 (vLLM-Omni #1223), here 40 steps and a long decode
VIDEO = InventedModel(
    "video",
    text_encoder_bytes=11_400 * MB,
    diffusion_bytes=28_600 * MB,
    vae_bytes=254 * MB,
    activation_bytes=10 * GIB,
    scratch_bytes=GIB // 2,
    encode_seconds=0.03,
    step_seconds=1.75,
    decode_seconds=4.0,
    lora_bytes=600 * MB,
    controlnet_bytes=6000 * MB,
    patched_share=0.9,
    loras_reach_text=False,
)
