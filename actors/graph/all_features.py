"""The features of requests, and the orders in which they act."""

from __future__ import annotations

from modelpool.actors.graph.features.control_graph import CONTROLS
from modelpool.actors.graph.features.control_video_graph import VIDEOS
from modelpool.actors.graph.features.decoder_graph import DECODER
from modelpool.actors.graph.features.expert_graph import EXPERTS
from modelpool.actors.graph.features.feature import Feature
from modelpool.actors.graph.features.image_concat_graph import IMAGE_CONCAT
from modelpool.actors.graph.features.image_prompt_graph import IMAGE_PROMPTS
from modelpool.actors.graph.features.lora_graph import LORAS
from modelpool.actors.graph.features.music_graph import MUSIC
from modelpool.actors.graph.features.option_checks import OPTIONS
from modelpool.actors.graph.features.reference_graph import REFERENCE_SIZE, REFERENCES
from modelpool.actors.graph.features.region_graph import REGIONS
from modelpool.actors.graph.features.sampling_defaults import BASE, CLIP, SAMPLER
from modelpool.actors.graph.features.schedule_guidance import NOISE
from modelpool.actors.graph.features.start_image_graph import HIRES, START_IMAGE
from modelpool.actors.graph.features.upscale_graph import UPSCALE
from modelpool.actors.graph.features.video_output_graph import FILE, FRAMES, SIZE
from modelpool.actors.graph.features.vision_graph import VIDEO_NUMBERS, VIEW

#: all features. Checks and restored inputs have this order: the first error is reported
FEATURES: tuple[Feature, ...] = (
    *(BASE, LORAS, CLIP, SAMPLER, SIZE, FRAMES, START_IMAGE, HIRES, VIDEOS, VIEW, VIDEO_NUMBERS, IMAGE_CONCAT),
    *(REFERENCES, REFERENCE_SIZE, DECODER, EXPERTS, UPSCALE, OPTIONS, NOISE, MUSIC, FILE),
    *(CONTROLS, IMAGE_PROMPTS, REGIONS),
)
#: the features with defaults: of several sizes, the last one counts
DEFAULTS_ORDER: tuple[Feature, ...] = (
    *(BASE, EXPERTS, REFERENCE_SIZE, VIDEOS, IMAGE_CONCAT, SIZE, REFERENCES, NOISE, MUSIC, FILE),
)
#: the features with lines, in the order of `modelpool inspect`
LINE_ORDER: tuple[Feature, ...] = (
    *(BASE, NOISE, DECODER, UPSCALE, EXPERTS, OPTIONS, LORAS, CLIP, SAMPLER, SIZE, VIEW, FRAMES, VIDEO_NUMBERS),
    *(MUSIC, FILE, START_IMAGE, HIRES, CONTROLS, IMAGE_PROMPTS, REGIONS, REFERENCES, VIDEOS, IMAGE_CONCAT),
)
