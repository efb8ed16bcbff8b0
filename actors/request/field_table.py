"""The table of request fields: default, unit, range, meaning, command-line option and version of each, in one place.

`GenerateRequest` takes defaults, descriptions and checks from it, `modelpool generate` its options, job files the
fields that do not change older seeds, and docs/reference/requests.md is written from it. Whether a model supports a
field is checked with the catalog (`actors.graph.all_features`); `requires` says what it must support. Torch-free,
ray-free; imports no pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from modelpool.actors.request.bounds import (
    MAX_ENTRIES,
    MAX_LORAS,
    MAX_NAME_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    check_characters,
    check_entries,
)
from modelpool.actors.request.gpu_fields import checked_gpus
from modelpool.actors.request.labels import MAX_METADATA_BYTES, checked_id, checked_metadata
from modelpool.actors.request.music_fields import MAX_BPM, MAX_LYRICS, checked_lyrics, music_word
from modelpool.actors.request.number_fields import CFG, STEPS, Number, Whole, WholeOrWord, noise_levels
from modelpool.actors.request.option_words import option_words
from modelpool.actors.request.pass_bounds import MAX_PASSES
from modelpool.actors.request.qos import MAX_PRIORITY
from modelpool.actors.request.video_output_fields import (
    AUDIO_FORMATS,
    DEFAULT_QUALITY,
    IMAGE_FORMATS,
    MAX_QUALITY,
    VIDEO_FORMATS,
    VIDEO_QUALITY,
    checked_format,
)
from modelpool.pool.inference.sampling.sampler_names import MAX_CFG, MAX_STEPS, SAMPLERS
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.previews import checked_preview

#: sizes are multiples of this: the VAE halves an image three times
SIZE_STEP = 8
MAX_SIZE = 16384
#: noise levels used in the training of the upscaler. Source: `max_noise_level` of
#: stabilityai/stable-diffusion-x4-upscaler
MAX_NOISE_LEVEL = 350
#: CLIP-G has 32 layers, and two of them are read
MAX_CLIP_SKIP = 30
#: images of a forward pass; more save nothing on any GPU
MAX_BATCH = 64
#: tiles of a VAE: smaller ones see too little of the image, and larger ones save no memory
MIN_VAE_TILE, MAX_VAE_TILE, MIN_VAE_FRAMES = 64, 8192, 8
#: as many as pay, by measurements (`actors.graph.features.auto_batch`)
AUTO_BATCH = "auto"
#: the size is chosen when a request is accepted, by the load (`scheduler.decisions.queue.size_by_load`)
ADAPTIVE_BATCH = "adaptive"
#: sizes that the pool chooses
CHOSEN_BATCHES = (AUTO_BATCH, ADAPTIVE_BATCH)
#: bounds of a request; far above what models generate in one run
MAX_FRAMES, MAX_FRAME_RATE, MAX_SECONDS = 1 << 14, 240.0, 3600.0
#: outputs of one request, and lines of a job file
MAX_OUTPUTS, MAX_LINE = 1000, 10**9
#: the latest version of requests: it has fields that were added after the first release
LATEST = 2

#: how the command line reads an option: one word, a number, several words, or a switch without a value
OptionKind: TypeAlias = Literal["text", "whole", "number", "texts", "switch"]
IMAGE, INPUTS, VIDEO, SCHEDULING = "Image", "Input images", "Videos and audio", "Scheduling"


@dataclass(frozen=True, slots=True)
class Option:
    """The option of `modelpool generate` for a field.

    help   one line; the default is part of it
    sets   the fields that a value sets; None: the field, to the value
    """

    flag: str
    metavar: str
    help: str
    panel: str = IMAGE
    kind: OptionKind = "text"
    sets: Callable[[Any], dict[str, Any]] | None = None

    @property
    def parameter(self) -> str:
        """The name of the parameter of the command."""
        return self.flag.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a request.

    meaning   for users, without its range; Markdown
    default   None stands for the model's default, or for "not used"
    is_required  it has no default
    unit      of numbers
    check     parses and checks a value that is not None; None: `GenerateRequest` does, by type or together with others
    requires  what a model must support; "" for all models
    since     version of requests that introduced it. Later fields that are not used change no seeds of job files
    option    None: not on the command line
    in_run    False: of the whole request, as its file, its decodes and its place in the queue. The runs of a workflow
              and of passes do not have it
    most_characters, most_entries  of a value that is a text, and of one that is a list or a mapping
    """

    name: str
    meaning: str
    default: Any = None
    is_required: bool = False
    unit: str = ""
    check: Number | Whole | WholeOrWord | Callable[[Any], Any] | None = None
    requires: str = ""
    since: int = LATEST
    option: Option | None = None
    in_run: bool = True
    most_characters: int = MAX_NAME_CHARACTERS
    most_entries: int = MAX_ENTRIES

    @property
    def range(self) -> str:
        """The accepted values in words; "" if the field has no range of its own."""
        return self.check.expected if isinstance(self.check, Number | Whole | WholeOrWord) else ""

    def checked(self, value: Any) -> Any:
        """Return the parsed value. Raises UserError that names the field."""
        if isinstance(value, str) and not isinstance(
            self.check, Number | Whole | WholeOrWord
        ):  # texts of numbers are short
            check_characters(self.name, value, self.most_characters)
        check_entries(self.name, value, self.most_entries)
        if self.check is None or (value is None and self.default is None):
            return value
        if isinstance(self.check, Number | Whole | WholeOrWord):
            return self.check.parse(self.name, value)
        return self.check(value)


def _size(text: str) -> dict[str, Any]:
    """Return the width and height of "64x96". Raises UnusableField."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.strip().isdecimal() and height.strip().isdecimal()):
        raise unusable_field("--size", text, "WIDTHxHEIGHT in pixels, such as 512x768")
    return {"width": int(width), "height": int(height)}


_BETA_SHAPE = Number(0.1, 10.0)
_SIDE = Whole(SIZE_STEP, MAX_SIZE, step=SIZE_STEP)
_OF_MODEL = "(default: depends on the model)"
_VIEW = "another view of an object (Zero123)"

_ROWS = (
    RequestField(
        "model",
        "Name of the model.",
        is_required=True,
        since=1,
        option=Option("--model", "NAME", "Model name (default: the only one found)."),
    ),
    RequestField("prompt", "What to generate.", is_required=True, since=1, most_characters=MAX_PROMPT_CHARACTERS),
    RequestField(
        "loras",
        'LoRAs with their strengths: "light", "light:0.8", ("light", 0.8), {"name": "light", "strength": 0.8}, or '
        '{"light": 0.8} for all. "light:0.8@0-0.5" acts in the first half of the schedule; "light:0.5:0.8" has 0.5 on '
        'the text encoders; "light:0.8:lbw=..." has a factor for each block; "light:0.2@0,1@0.5" changes its strength '
        'at half of the steps; "light:0.8:only=negative" acts for one text. For models with two experts, append "high" '
        'or "low" to apply one to one expert.',
        (),
        since=1,
        option=Option(
            "--lora",
            "NAME:X",
            "LoRA and strength; repeatable. For models with two experts, append :high or :low.",
            kind="texts",
            sets=lambda words: {"loras": tuple(words)},
        ),
        most_entries=MAX_LORAS,
    ),
    RequestField(
        "negative",
        "What to avoid. Ignored, with a warning, by models and settings without such guidance.",
        "",
        requires="guidance by a negative prompt",
        since=1,
        option=Option("--negative", "TEXT", "What to avoid in the image."),
        most_characters=MAX_PROMPT_CHARACTERS,
    ),
    RequestField(
        "steps",
        "Sampling steps. Models with defaults of their own replace this one, and those of `cfg` and `sampler`.",
        20,
        check=STEPS,
        since=1,
        option=Option("--steps", "N", "Sampling steps (default: 20).", kind="whole"),
    ),
    RequestField(
        "cfg",
        "Guidance scale.",
        5.0,
        check=CFG,
        since=1,
        option=Option("--cfg", "X", "Guidance scale; 1 disables guidance (default: 5).", kind="number"),
    ),
    RequestField(
        "sampler",
        'Sampler; its name may include the schedule: "dpmpp_2m_karras". Names of A1111 and diffusers are accepted.',
        "euler",
        since=1,
        option=Option("--sampler", "NAME", f"{', '.join(SAMPLERS)} (default: euler)."),
    ),
    RequestField(
        "schedule",
        "Schedule of noise levels; default: the model's, or else the sampler's.",
        since=1,
        option=Option("--schedule", "NAME", "normal, karras, simple, ... (default: depends on the sampler)."),
    ),
    RequestField(
        "sigmas",
        "The noise levels themselves, instead of a schedule: one for each step, falling, from a list or a text with "
        "commas. A final 0 may be left out. `steps` is their number. Not with DPM fast, DPM adaptive and Restart, "
        "which place their own steps.",
        (),
        check=noise_levels,
        option=Option("--sigmas", "X,X,...", "Noise levels, one per step, instead of a schedule."),
        most_characters=32 * MAX_STEPS,
    ),
    RequestField(
        "eta",
        "Share of the noise that a sampler draws again in each step: 0 draws none, 1 as much as DDPM. Default: the "
        "sampler's. Samplers that do not read it are warned of.",
        check=Number(0.0, 1.0),
        option=Option(
            "--eta", "X", "Share of noise drawn in each step, 0 to 1 (default: the sampler's).", kind="number"
        ),
    ),
    RequestField(
        "s_noise",
        "Factor of the noise that a sampler draws in its steps.",
        1.0,
        check=Number(0.0, 2.0),
        option=Option("--s-noise", "X", "Factor of the noise drawn in steps (default: 1).", kind="number"),
    ),
    RequestField(
        "s_churn",
        "Noise added before the steps of Euler, Heun, HeunPP2, DPM2 and DDIM, over the whole run. Other samplers are "
        "warned of.",
        0.0,
        check=Number(0.0, 1000.0),
        option=Option(
            "--s-churn", "X", "Noise added before steps of Euler, Heun and DPM2 (default: 0).", kind="number"
        ),
    ),
    RequestField(
        "shift",
        "Shift of the noise levels of a flow model (diffusers' `shift` of its schedulers, ComfyUI's ModelSampling "
        "nodes): above 1, more of the steps are at high noise; 1 is even. It replaces a shift that depends on the size "
        "of the image. Default: the model's.",
        check=Number(0.01, 100.0),
        requires="noise levels with a shift",
        option=Option("--shift", "X", "Shift of a flow model's noise levels (default: the model's).", kind="number"),
    ),
    RequestField(
        "beta_alpha",
        "Alpha of the beta distribution from which schedule `beta` takes its steps, as in ComfyUI and Forge: below 1, "
        "more of the steps are at low noise. Default: 0.6.",
        check=_BETA_SHAPE,
        option=Option("--beta-alpha", "X", "Alpha of schedule beta (default: 0.6).", kind="number"),
    ),
    RequestField(
        "beta_beta",
        "Beta of the same distribution: below 1, more of the steps are at high noise. Default: 0.6.",
        check=_BETA_SHAPE,
        option=Option("--beta-beta", "X", "Beta of schedule beta (default: 0.6).", kind="number"),
    ),
    RequestField(
        "width",
        'Width of the output. Default: that of `image`, else the model\'s. `size`, as in "512x768", is width and '
        "height.",
        unit="pixels",
        check=_SIDE,
        since=1,
        option=Option("--size", "WxH", f"Size in pixels, such as 512x768 {_OF_MODEL}.", sets=_size),
    ),
    RequestField("height", "Height of the output. Default: as `width`.", unit="pixels", check=_SIDE, since=1),
    RequestField(
        "batch",
        "Images of the forward passes in which the output is sampled: with others that differ only in text and seed, "
        "and with padding where some are missing. Usual texts and small images are encoded and decoded so, too. A "
        "larger one takes less time for each of many images, and as many times the memory of a run. The last bits of "
        "the output depend on it, but not on the other images of the pass: the same request has the same bytes on any "
        "worker, beside any others. `auto` is as many as pay, by a table of measurements for the model, the size and "
        "the kind of GPU, and fit into memory; the recipe has the number. `modelpool batch` and `modelpool submit` "
        "use `auto` for lines without it. `adaptive`, for requests that clients wait for, is that or 1, by the "
        "requests that came before: of two equal requests the last bits may differ.",
        1,
        check=WholeOrWord(Whole(1, MAX_BATCH), CHOSEN_BATCHES),
        option=Option(
            "--batch",
            "N",
            "Images per forward pass, padded if fewer wait; auto: as measured; adaptive: that or 1, by the load "
            "(default: 1, for job files auto).",
        ),
        in_run=False,
    ),
    RequestField(
        "vae_tile",
        "Edge of the tiles in which the VAE decodes the output, each overlapping the next one by a quarter. "
        "Idle workers take tiles of a large output as tasks of their own; the number of workers changes no byte. "
        "With a `batch`, each output is decoded alone. Default: the whole output at once, or tiles where a GPU has too "
        "little memory for that.",
        unit="pixels",
        check=Whole(MIN_VAE_TILE, MAX_VAE_TILE, step=SIZE_STEP),
        requires="images or videos",
        option=Option(
            "--vae-tile", "N", "Decode in tiles of N pixels, on all idle workers (default: whole).", kind="whole"
        ),
        in_run=False,
    ),
    RequestField(
        "vae_frames",
        "Frames of a tile in which the VAE decodes a video, likewise. They start in the middle of the video, so that "
        "few frames before them are seen: take as many as memory allows. Default: all frames.",
        unit="frames",
        check=Whole(MIN_VAE_FRAMES, MAX_FRAMES),
        requires="videos, and a VAE that decodes parts of them",
        option=Option("--vae-frames", "N", "Decode a video in tiles of N frames (default: all).", VIDEO, "whole"),
        in_run=False,
    ),
    RequestField(
        "gpus",
        "GPUs that share the sampling of the output, for images and videos that take long: 2, 4 or 8, or "
        '"auto" for as many as the scheduler finds worth it. They divide the prompts of guidance and the tokens of the '
        "model. Not with ControlNets, image prompts, regions, reference images or options. The last bits of the output "
        'depend on the number, and so on the scheduler with "auto"; with 1, they are those of a run by itself.',
        1,
        check=checked_gpus,
        option=Option("--gpus-per-output", "N", 'GPUs that share an output, or "auto" (default: 1).'),
    ),
    RequestField(
        "clip_skip",
        'Last layers of CLIP that are skipped in addition to those that the family of the model skips: "Clip skip" of '
        "A1111, minus one. Models without CLIP ignore it.",
        0,
        check=Whole(0, MAX_CLIP_SKIP),
        requires="a CLIP text encoder",
        option=Option(
            "--clip-skip",
            "N",
            "Number of final CLIP layers to skip; one less than in A1111 (default: 0).",
            kind="whole",
        ),
    ),
    RequestField(
        "decoder",
        "Decoder of a two-stage model, its steps and guidance scale.",
        requires="two stages (Stable Cascade)",
        option=Option(
            "--decoder",
            "NAME:N:X",
            "Stable Cascade: stage B model, its steps and guidance (default: the one next to --model).",
        ),
        in_run=False,
    ),
    RequestField(
        "low_noise",
        "Guidance scale of the low-noise expert, and the noise level below which it takes over.",
        requires="two experts (Wan 2.2)",
        option=Option(
            "--low-noise",
            "X:B",
            f"Two experts: guidance of the low-noise expert, and its boundary {_OF_MODEL}.",
        ),
    ),
    RequestField(
        "options",
        "Extensions of the guidance, changes inside the model, and caches over the steps, by name: "
        '`{"freeu": True, "pag": {"scale": 3}}`, or `{"pag.scale": 3}`. A number sets the first setting of most. See '
        "[Options](options.md) for all of them, with the families that have them.",
        requires="the named options",
        option=Option(
            "--option",
            "NAME=VALUE",
            "Option of the run, as freeu=on, pag=3 or pag.scale=3; repeatable.",
            kind="texts",
            sets=option_words,
        ),
    ),
    RequestField(
        "seed",
        "Seed of the noise; drawn at submission if it is not set. The noise depends on its lower 32 bits alone, as in "
        "torch and ComfyUI: seeds 2**32 apart make one image.",
        check=Whole(0, 2**64 - 1, expected="a whole number from 0 to 2**64 - 1"),
        since=1,
        option=Option("--seed", "N", "Seed of the first image; later ones count up (default: random).", kind="whole"),
    ),
    RequestField(
        "image",
        "Image to start from: a path, a Pillow image or a numpy array. It is scaled to cover the output size, keeping "
        "proportions, and cropped at the centre; its own size is rounded to steps of 8 pixels. The first frame of a "
        "video, if the model supports that; models that edit or enlarge an image read it here.",
        option=Option("--image", "FILE", "Start image; sets the size.", INPUTS),
    ),
    RequestField(
        "mask",
        "Mask image of the size of `image`; white areas are regenerated, black areas are kept.",
        option=Option("--mask", "FILE", "Mask image; white areas are regenerated.", INPUTS),
    ),
    RequestField(
        "strength",
        "Denoising strength: the fraction of the schedule that is run, at its end. Default: 0.6, or 1 with a mask.",
        option=Option("--strength", "X", "Denoising strength (default: 0.6, or 1 with a mask).", INPUTS, "number"),
    ),
    RequestField(
        "paste",
        "Restore the black areas of the mask exactly from `image`.",
        True,
        option=Option(
            "--no-paste",
            " ",
            "Do not paste the unmasked area back (default: paste).",
            INPUTS,
            "switch",
            lambda is_set: {"paste": False},
        ),
        in_run=False,
    ),
    RequestField(
        "hires",
        "Generate a small image, scale it up, and regenerate it partly: scale, strength, steps.",
        option=Option(
            "--hires",
            "X:Y:N",
            "Two-pass generation: scale, strength, steps, upscaler, as in 2, 2:0.5:10 or 2:0.5=NAME.",
            INPUTS,
        ),
        in_run=False,
    ),
    RequestField(
        "passes",
        "Further sampling runs, each on the result of the one before: a refiner, several steps of enlargement, another "
        "model or sampler. Each sets what differs from the request, and its strength, size or first step: "
        '`[{"model": "refiner", "start_step": 16}, {"scale": 1.5, "strength": 0.4}]`.',
        (),
        most_entries=MAX_PASSES,
        in_run=False,
    ),
    RequestField(
        "workflow",
        "A graph of nodes instead of a single image: texts, images, samplings, decodings, upscalings and operations, "
        'each with the nodes that it reads: `{"nodes": {ID: NODE}, "output": ID}`. Beside it, a request has only a '
        "seed, a file format, and what does not change the output; model and prompt are those of the last sampling "
        "run.",
        in_run=False,
    ),
    RequestField(
        "upscale",
        "Upscaler that enlarges the decoded output (ESRGAN and its relatives): its name, and the scale of the result, "
        "the edge of its tiles and their overlap.",
        option=Option(
            "--upscale", "NAME:X", "Upscaler of the result, and its scale (default: that of the upscaler).", INPUTS
        ),
        in_run=False,
    ),
    RequestField(
        "controls",
        "ControlNets with their control images, strengths, and parts of the schedule.",
        (),
        requires="a ControlNet for the model's architecture",
        option=Option(
            "--control",
            "NAME=FILE:X",
            "ControlNet (NAME@MODE if it has several modes), its control image (without =FILE: --image), "
            "strength, and start and end as shares of the steps; repeatable.",
            INPUTS,
            "texts",
            lambda words: {"controls": tuple(words)},
        ),
    ),
    RequestField(
        "image_prompts",
        "Images that IP-Adapters and Redux read as prompts, with their strengths and parts of the schedule.",
        (),
        requires="an adapter for the model's architecture, and its vision encoder",
        option=Option(
            "--image-prompt",
            "NAME=FILE:X",
            "IP-Adapter or Redux, the image that it reads, strength, and start and end as shares of the steps; "
            '",mask=FILE" at the end says where it acts; repeatable.',
            INPUTS,
            "texts",
            lambda words: {"image_prompts": tuple(words)},
        ),
    ),
    RequestField(
        "regions",
        "Prompts for parts of the image, in boxes or masks, with their strengths.",
        (),
        option=Option(
            "--region",
            "X,Y,W,H:S=TEXT",
            "Prompt for a box of the image, and its strength (default: 1); repeatable.",
            INPUTS,
            "texts",
            lambda words: {"regions": tuple(words)},
        ),
    ),
    RequestField(
        "reference",
        "Reference image, or a list of several. It keeps its proportions and is read at about as many pixels as the "
        "output; a missing output size follows it (the last one).",
        requires="reference images (Flux Kontext, Qwen-Image-Edit, Qwen-Image layered, JoyImage, GLM-Image, OmniGen, "
        "OmniGen 2, HiDream E1)",
        option=Option(
            "--reference",
            "FILE",
            "Reference image, for models that accept one (Flux Kontext, Qwen-Image-Edit); repeatable.",
            INPUTS,
            "texts",
            lambda words: {"reference": tuple(words)},
        ),
    ),
    RequestField(
        "reference_as",
        'How the text encoder reads `reference`: "whole", or "numbered" (smaller, and called "Picture 1"). Default: as '
        'the model was trained, and "numbered" for several images.',
        requires="a text encoder that reads images",
        option=Option(
            "--reference-as",
            "HOW",
            "How the text encoder sees --reference: whole or numbered (default: depends on the model).",
            INPUTS,
        ),
    ),
    RequestField(
        "image_cfg",
        "Guidance scale of `image`, or of `reference` for OmniGen, OmniGen 2 and HiDream E1. Default: the model's.",
        check=Number(1.0, MAX_CFG, f"a number from 1 (no guidance by the image) to {MAX_CFG:g}"),
        requires="guidance by text and image (InstructPix2Pix, OmniGen, OmniGen 2, HiDream E1)",
        option=Option(
            "--image-cfg",
            "X",
            f"Image guidance scale, for instruction-editing models {_OF_MODEL}.",
            INPUTS,
            "number",
        ),
    ),
    RequestField(
        "noise_level",
        "Noise added to `image` by an upscaling model. Default: the model's.",
        check=Whole(0, MAX_NOISE_LEVEL),
        requires="upscaling with noise (the x4 upscaler)",
        option=Option(
            "--noise-level",
            "N",
            f"Noise level 0 to {MAX_NOISE_LEVEL} for --image, for upscaling models {_OF_MODEL}.",
            INPUTS,
            "whole",
        ),
    ),
    RequestField(
        "frames",
        "Frames of a video; models accept a multiple of a number plus one. A video of 1 frame is a video. For models "
        "that split an image, the number of layers. Default: the model's.",
        check=Whole(1, MAX_FRAMES),
        requires="video",
        option=Option("--frames", "N", f"Number of frames of a video, or of layers {_OF_MODEL}.", VIDEO, "whole"),
    ),
    RequestField(
        "frame_rate",
        "Frames per second of a video. Default: the model's.",
        unit="1/s",
        check=Number(0.0, MAX_FRAME_RATE, above=True),
        requires="video",
        option=Option(
            "--fps", "X", f"Frames per second {_OF_MODEL}.", VIDEO, "number", lambda rate: {"frame_rate": rate}
        ),
    ),
    RequestField(
        "seconds",
        "Length of an audio clip. Default: the model's, for Stable Audio its longest.",
        unit="s",
        check=Number(0.0, MAX_SECONDS, above=True),
        requires="audio",
        option=Option("--seconds", "X", f"Length of audio in seconds {_OF_MODEL}.", VIDEO, "number"),
    ),
    RequestField(
        "lyrics",
        "Lyrics of music, with lines such as `[verse]` and `[chorus]` between its parts. Brackets set no weights. "
        "Default: none, for music without a voice.",
        check=checked_lyrics,
        requires="lyrics (ACE-Step 1.5)",
        option=Option("--lyrics", "TEXT", "Lyrics of music, for models that read them (default: none).", VIDEO),
        most_characters=MAX_LYRICS,
    ),
    RequestField(
        "lyrics_language",
        "Language of the lyrics, as a code such as `en` or `zh`. Default: `en`.",
        check=partial(music_word, "lyrics_language"),
        requires="lyrics (ACE-Step 1.5)",
        option=Option("--lyrics-language", "CODE", "Language of --lyrics (default: en).", VIDEO),
    ),
    RequestField(
        "bpm",
        "Tempo of music. Default: the model chooses.",
        unit="beats per minute",
        check=Whole(1, MAX_BPM),
        requires="lyrics (ACE-Step 1.5)",
        option=Option("--bpm", "N", "Beats per minute of music (default: the model chooses).", VIDEO, "whole"),
    ),
    RequestField(
        "key_scale",
        "Key of music, such as `C major`. Default: the model chooses.",
        check=partial(music_word, "key_scale"),
        requires="lyrics (ACE-Step 1.5)",
        option=Option("--key-scale", "NAME", "Key of music, such as 'C major' (default: the model chooses).", VIDEO),
    ),
    RequestField(
        "time_signature",
        "Beats in a bar of music, such as `4` or `6/8`. Default: the model chooses.",
        check=partial(music_word, "time_signature"),
        requires="lyrics (ACE-Step 1.5)",
        option=Option("--time-signature", "BEATS", "Beats in a bar of music (default: the model chooses).", VIDEO),
    ),
    RequestField(
        "format",
        f"File format: images {', '.join(IMAGE_FORMATS)}; "
        f"videos {', '.join(VIDEO_FORMATS)}; audio {', '.join(AUDIO_FORMATS)}. Default: the first of these.",
        check=checked_format,
        option=Option(
            "--format",
            "NAME",
            f"Format of images: {', '.join(IMAGE_FORMATS)} (default: {IMAGE_FORMATS[0]}); of videos: "
            f"{', '.join(VIDEO_FORMATS)} (default: {VIDEO_FORMATS[0]}); of audio: {', '.join(AUDIO_FORMATS)} "
            f"(default: {AUDIO_FORMATS[0]}).",
        ),
        in_run=False,
    ),
    RequestField(
        "quality",
        "Quality of a file with lossy compression; webp at 100 is lossless, and mp4 and webm have 100 less the "
        "constant rate factor of their encoder. Default: "
        f"{', '.join(f'{name} {quality}' for name, quality in (*DEFAULT_QUALITY.items(), *VIDEO_QUALITY.items()))}.",
        check=Whole(1, MAX_QUALITY),
        requires="image or video output",
        option=Option(
            "--quality", "N", f"Quality of webp, jpg and avif images, mp4 and webm, 1 to {MAX_QUALITY}.", kind="whole"
        ),
        in_run=False,
    ),
    RequestField(
        "last_image",
        "Last frame of a video, in addition to `image`.",
        requires="a last frame",
        option=Option(
            "--last-image",
            "FILE",
            "Last frame of the video, for models that accept one in addition to --image.",
            VIDEO,
        ),
    ),
    RequestField(
        "motion",
        "Amount of motion in a video; Stable Video Diffusion was trained with up to 255. Default: the model's.",
        check=Whole(0, 1023),
        requires="an amount of motion (Stable Video Diffusion)",
        option=Option(
            "--motion", "N", f"Amount of motion, 0 to 1023, for models that accept it {_OF_MODEL}.", VIDEO, "whole"
        ),
    ),
    RequestField(
        "image_noise",
        "Standard deviation of the noise on the first frame, whose pixels are from -1 to 1: with more noise, the video "
        "follows the image less. Default: the model's.",
        check=Number(0.0, 1.0),
        requires="noise on the first frame (Stable Video Diffusion)",
        option=Option(
            "--image-noise",
            "X",
            f"Noise added to --image, 0 to 1, for models that accept it {_OF_MODEL}.",
            VIDEO,
            "number",
        ),
    ),
    RequestField(
        "elevation",
        "Camera elevation of an orbit, or of another view: above that of the image, or with `image_elevation` above "
        "the ground. Default: 0.",
        unit="degrees",
        check=Number(-90.0, 90.0),
        requires="an orbit around an object (SV3D) or another view of it (Zero123)",
        option=Option(
            "--elevation",
            "X",
            "Camera elevation in degrees, -90 to 90, for orbit videos and other views (default: 0).",
            VIDEO,
            "number",
        ),
    ),
    RequestField(
        "azimuth",
        "Angle around the object from the camera of the image, for another view. Default: 0.",
        unit="degrees",
        check=Number(-360.0, 360.0),
        requires=_VIEW,
        option=Option(
            "--azimuth",
            "X",
            "Angle in degrees around the object of --image, -360 to 360, for another view (default: 0).",
            INPUTS,
            "number",
        ),
    ),
    RequestField(
        "camera_distance",
        "Distance of the camera, less that of the image's camera, for another view. Default: 0.",
        check=Number(-2.0, 2.0),
        requires=_VIEW,
        option=Option(
            "--camera-distance",
            "X",
            "Distance of the camera, less that of the camera of --image, -2 to 2, for another view (default: 0).",
            INPUTS,
            "number",
        ),
    ),
    RequestField(
        "image_elevation",
        "Camera elevation of the image, which Stable Zero123 reads in the place of `camera_distance`. Default: 0 if "
        'the name of the model has "stable" in it, else none.',
        unit="degrees",
        check=Number(-90.0, 90.0),
        requires=_VIEW,
        option=Option(
            "--image-elevation",
            "X",
            "Camera elevation of --image in degrees, -90 to 90, for Stable Zero123 (default: 0).",
            INPUTS,
            "number",
        ),
    ),
    RequestField(
        "video",
        "Control video: a path, a list of paths or images, or a numpy array. Missing sizes and frames follow it; if it "
        "is shorter than the output, the rest is generated freely (Wan VACE), or follows it back and forth.",
        requires="a control video (Wan VACE, Wan 2.2 animate, CogVideoX Fun, Wan Fun)",
        option=Option(
            "--video",
            "FILE",
            "Control video, for models that accept one (Wan VACE, Wan 2.2 animate, CogVideoX Fun); sets size and "
            "frames.",
            VIDEO,
        ),
        most_entries=MAX_FRAMES,
        in_run=False,
    ),
    RequestField(
        "video_mask",
        "Video or image of the size of `video`; white areas are regenerated (following `video` there), black areas are "
        "kept. Default: all white.",
        requires="a control video (Wan VACE)",
        option=Option(
            "--video-mask",
            "FILE",
            "Mask video or image for --video; white areas are regenerated, black areas are kept.",
            VIDEO,
        ),
        most_entries=MAX_FRAMES,
        in_run=False,
    ),
    RequestField(
        "face_video",
        "Video of the face whose expressions the character has, with as many frames as `video`, which has its poses: "
        "scaled to squares, whose centre is used.",
        requires="a character to animate (Wan 2.2 animate)",
        option=Option(
            "--face-video",
            "FILE",
            "Video of the face, frame by frame as --video, for models that animate a character (Wan 2.2 animate).",
            VIDEO,
        ),
        most_entries=MAX_FRAMES,
        in_run=False,
    ),
    RequestField(
        "priority",
        "Of waiting tasks, a higher priority runs first. Does not change the output.",
        0,
        check=Whole(-MAX_PRIORITY, MAX_PRIORITY),
        since=1,
        option=Option("--priority", "N", "Higher priorities run first (default: 0).", SCHEDULING, "whole"),
        in_run=False,
    ),
    RequestField(
        "user",
        "User for fair-share scheduling; default: the driver's. Does not change the output.",
        since=1,
        option=Option("--user", "NAME", "User for fair-share scheduling (default: your login name).", SCHEDULING),
        in_run=False,
    ),
    RequestField(
        "deadline",
        'Time from submission by which it should be done, such as 90 (seconds) or "10m". Does not change the output.',
        unit="s",
        since=1,
        option=Option("--deadline", "TIME", "Target completion time: 45s, 10m, 2h (default: none).", SCHEDULING),
        in_run=False,
    ),
    RequestField(
        "n",
        "Number of outputs, with consecutive seeds: one request becomes `n` of them. diffusers calls it "
        "`num_images_per_prompt`. The interfaces of OpenAI, A1111 and ComfyUI have counts of their own.",
        1,
        check=Whole(1, MAX_OUTPUTS),
        in_run=False,
    ),
    RequestField(
        "id",
        "Text that identifies the request for you: up to 200 printable characters, or a whole number. Its output "
        "carries it: in the manifest, in PNG files, in results and in `--json`. Equal requests with different ids are "
        "computed once and have a file each. Does not change the output.",
        check=checked_id,
        in_run=False,
    ),
    RequestField(
        "metadata",
        f"JSON values that the output carries, as `id`: up to {MAX_METADATA_BYTES >> 10} KiB. Does not change the "
        "output.",
        check=checked_metadata,
        most_characters=MAX_METADATA_BYTES,
        most_entries=MAX_METADATA_BYTES,
        in_run=False,
    ),
    RequestField(
        "line",
        "Line of the job file that the request is from, from 1; `modelpool batch` and `submit` set it. Does not change "
        "the output.",
        check=Whole(1, MAX_LINE),
        in_run=False,
    ),
    RequestField(
        "preview",
        'Previews while it is sampled: "auto", "latent_rgb" (a linear map of the latent), "taesd" (a tiny decoder), or '
        '"none", whoever asks. Default: "auto" while somebody asks for previews. Does not change the output.',
        check=checked_preview,
        in_run=False,
    ),
)

#: all fields of a request by name, in the order of help and documentation
REQUEST_FIELDS: Mapping[str, RequestField] = MappingProxyType({row.name: row for row in _ROWS})
#: fields of the whole request, which one run of it does not have
OUTER_FIELDS = tuple(row.name for row in _ROWS if not row.in_run)
#: fields that only some models support: a request may have them under `options`, too
OPTION_FIELDS = tuple(row.name for row in _ROWS if row.requires and row.since > 1 and row.name != "options")
#: fields that were added after the first version
LATER_FIELDS = tuple(row.name for row in _ROWS if row.since > 1)
