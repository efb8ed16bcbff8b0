"""Names that other programs use for the fields of a request, so that an error can suggest the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from modelpool.pool.values.core.errors import UnknownName, unknown_name

#: by the name in lower case with underscores. Sources: arguments of diffusers' pipelines, the A1111 web UI's API and
#: infotext, inputs of ComfyUI's nodes
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        # diffusers
        "negative_prompt": "negative",
        "num_inference_steps": "steps",
        "guidance_scale": "cfg",
        "image_guidance_scale": "image_cfg",
        "generator": "seed",
        "manual_seed": "seed",
        "num_frames": "frames",
        "fps": "frame_rate",
        "flow_shift": "shift",
        "motion_bucket_id": "motion",
        "noise_aug_strength": "image_noise",
        "audio_end_in_s": "seconds",
        "audio_length_in_s": "seconds",
        "audio_duration": "seconds",
        "vocal_language": "lyrics_language",
        "keyscale": "key_scale",
        "timesignature": "time_signature",
        "mask_image": "mask",
        "scheduler": "sampler",
        "adapters": "loras",
        "cross_attention_kwargs": "loras",
        "control_image": "controls",
        "ip_adapter_image": "image_prompts",
        "ip_adapter_scale": "image_prompts",
        "ip_adapter_masks": "image_prompts",
        "adapter_conditioning_scale": "controls",
        "output_type": "format",
        # A1111
        "cfg_scale": "cfg",
        "batch_size": "n",
        "n_iter": "n",
        "sampler_name": "sampler",
        "sampler_index": "sampler",
        "schedule_type": "schedule",
        "denoising_strength": "strength",
        "init_images": "image",
        "enable_hr": "hires",
        "hr_scale": "hires",
        "sd_model_checkpoint": "model",
        "checkpoint": "model",
        "model_name": "model",
        "lora": "loras",
        "controlnet": "controls",
        # ComfyUI
        "ckpt_name": "model",
        "unet_name": "model",
        "noise_seed": "seed",
        "denoise": "strength",
        "positive": "prompt",
        "text": "prompt",
        "caption": "prompt",
        "length": "frames",
        "stop_at_clip_layer": "clip_skip",
        "filename_prefix": "name",
        # others
        "neg_prompt": "negative",
        "num_images": "n",
        "num_samples": "n",
    }
)


def unknown_field(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """Return the error for a field that is not known, with the one that another program's name stands for, or the
    nearest.
    """
    names = sorted(known)
    meant = OTHER_NAMES.get(name.strip().lower().replace(" ", "_").replace("-", "_"), "")
    if meant not in names:
        return unknown_name(kind, name, names)
    return UnknownName(f"unknown {kind} {name!r}; did you mean {meant!r}?")
