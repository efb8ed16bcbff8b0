"""Golden workflows: graphs of nodes, and for each what its single steps make one by one (`golden_steps.Steps`).

Together they have every operation, every kind of task, and pairs of features that could disturb each other. Output is
the node "d".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from modelpool import GenerateRequest
from modelpool.pool.values.core.run_options import RunOptions
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    ImageCondition,
    ImagePixels,
    Latent,
    Mask,
    OutputShape,
    RegionParams,
    Result,
    StepPart,
    VideoFrames,
    VisionEncodeParams,
)
from tests.actors.golden_steps import (
    AUDIO,
    AUDIO_RATE,
    FRAME_RATE,
    FRAMES,
    SECONDS,
    SEED,
    SHOWN,
    SIDE,
    STEPS,
    VIDEO,
    Steps,
)

Nodes = Mapping[str, Any]
HAND = Callable[[Steps], Any]
BIGGER = {"factor": 1.5, "method": "bilinear"}
LARGE = SIDE * 3 // 2
BY_SIDES = {"width_factor": 1.5, "height_factor": 1.5, "multiple": 4, "method": "nearest-exact"}
FILTERED = {"factor": 0.5, "method": "bicubic", "oversampled": True}
#: a mask of the right half
HALF = np.zeros((SIDE, SIDE), np.uint8)
HALF[:, SIDE // 2 :] = 255
PHOTO = np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
LEFT, GOES_ON = StepPart(2, keeps_noise=True), StepPart(adds_noise=False)
MOVIE = OutputShape(SIDE, SIDE, FRAMES, FRAME_RATE)
CLIP = OutputShape(0, 0, seconds=SECONDS)
PACKED: Mapping[str, Mapping[str, Any]] = {
    "image_fit": {"width": 24, "height": 17, "how": "fill", "multiple": 4, "method": "bicubic"},
    "image_crop_at": {"width": 20, "height": 12, "position": "bottom-right", "x": -1},
    "image_sharpen_adaptive": {"amount": 0.6},
    "image_grey": {"factor": 0.5, "method": "average"},
    "mask_of_primary": {"colour": "blue", "red": 0.5, "green": 0.5, "blue": 0.6},
    "mask_of_near_colour": {"red": 120, "green": 120, "blue": 120, "threshold": 60},
    "mask_gaussian": {"radius": 2, "sigma": 1.1},
}
TURN, MIRROR = {"rotation": "90 degrees"}, {"method": "y-axis: horizontally"}


class Golden(NamedTuple):
    """A graph and its output by single steps."""

    nodes: Nodes
    by_hand: HAND

    @property
    def request(self) -> GenerateRequest:
        return GenerateRequest(workflow={"nodes": self.nodes, "output": "d"}, seed=SEED)


def sampling(model: str = "one", latent: str = "", mask: str = "", /, **fields: Any) -> dict[str, Any]:
    """A sampling run; `fields` are of the node, `request` of its request."""
    inputs = {name: node for name, node in (("latent", latent), ("mask", mask)) if node} | fields.pop("inputs", {})
    own = {} if {"positive", "negative"} & inputs.keys() else {"prompt": "a cat"}
    size = {} if latent else {"width": SIDE, "height": SIDE}
    usual = {"model": model, **own, "steps": STEPS, "cfg": 4.0, "sampler": "euler", "schedule": "normal", **size}
    wanted = {**usual, **fields.pop("request", {})}
    return {
        "kind": "sample",
        "request": {key: v for key, v in wanted.items() if v is not None},
        "inputs": inputs,
        **fields,
    }


def decoding(latent: str, model: str = "one", **fields: Any) -> dict[str, Any]:
    return {"kind": "decode", "model": model, "inputs": {"latent": latent}, **fields}


def encoding(image: str, model: str = "one", **inputs: str) -> dict[str, Any]:
    return {"kind": "encode", "model": model, "inputs": {"image": image, **inputs}}


def operation(name: str, settings: Mapping[str, Any] | None = None, /, **inputs: str) -> dict[str, Any]:
    return {"kind": "operation", "name": name, "settings": dict(settings or {}), "inputs": inputs}


def text(prompt: str, model: str = "one", **fields: Any) -> dict[str, Any]:
    return {"kind": "text", "model": model, "prompt": prompt, **fields}


def enlarging(image: str) -> dict[str, Any]:
    return {"kind": "upscale", "upscale": {"model": "sharp"}, "inputs": {"image": image}}


def of_latent(latent: Any, change: Callable[[Any], Any]) -> Latent:
    """A latent with other samples."""
    return replace(latent, samples_CHW=np.ascontiguousarray(change(latent.samples_CHW), np.float32))


def of_image(image: Any, change: Callable[[Any], Any]) -> ImagePixels:
    return ImagePixels(np.ascontiguousarray(change(image.pixels_HWC), np.uint8))


GIVEN: Nodes = {"photo": {"kind": "image", "image": PHOTO}, "half": {"kind": "mask", "mask": HALF}}
BASE: Nodes = {"s": sampling(), "d": decoding("s")}
#: single runs, and runs behind one another
CHAINS: dict[str, Golden] = {
    "one sampling run": Golden(BASE, lambda do: do.decode(do.sample())),
    "a refiner takes over": Golden(
        {
            "a": sampling(last_step=2, keeps_noise=True),
            "b": sampling("two", "a", first_step=2, adds_noise=False),
            "d": decoding("b"),
        },
        lambda do: do.decode(do.sample("two", first=2, part=GOES_ON, start=do.sample(part=LEFT))),
    ),
    "SDXL and its refiner": Golden(
        {
            "a": sampling("xl", last_step=2, keeps_noise=True),
            "b": sampling("refiner", "a", first_step=2, adds_noise=False),
            "d": decoding("b", "xl"),
        },
        lambda do: do.decode(do.sample("refiner", first=2, part=GOES_ON, start=do.sample("xl", part=LEFT)), "xl"),
    ),
    "a run that stops and goes on is one run": Golden(
        {
            "a": sampling(last_step=3, keeps_noise=True),
            "b": sampling("one", "a", first_step=3, adds_noise=False),
            "d": decoding("b"),
        },
        lambda do: do.decode(do.sample()),
    ),
    "three samplers share the steps": Golden(
        {
            "a": sampling(last_step=1, keeps_noise=True),
            "b": sampling(
                "two",
                "a",
                first_step=1,
                last_step=3,
                adds_noise=False,
                keeps_noise=True,
                request={"sampler": "dpmpp_2m"},
            ),
            "c": sampling("one", "b", first_step=3, adds_noise=False, request={"sampler": "euler_ancestral"}),
            "d": decoding("c"),
        },
        lambda do: do.decode(three_samplers(do)),
    ),
    "a run that ends early is finished": Golden(
        {"a": sampling(last_step=2), "d": decoding("a")}, lambda do: do.decode(do.sample(part=StepPart(2)))
    ),
    "noise that is left is decoded": Golden(
        {"a": sampling(last_step=2, keeps_noise=True), "d": decoding("a")}, lambda do: do.decode(do.sample(part=LEFT))
    ),
    "an empty latent is denoised partly": Golden(
        {"s": sampling(first_step=2), "d": decoding("s")}, lambda do: do.decode(do.sample(first=2))
    ),
    "noise is added to no latent twice": Golden(
        {"s": sampling(), "b": sampling("two", "s", first_step=1, adds_noise=False), "d": decoding("b")},
        lambda do: do.decode(do.sample("two", first=1, part=GOES_ON, start=do.sample())),
    ),
    "the latent is scaled in the middle": Golden(
        {
            "s": sampling(),
            "u": operation("latent_upscale_by", BIGGER, samples="s"),
            "b": sampling("two", "u", first_step=2),
            "d": decoding("b", "two"),
        },
        lambda do: do.decode(
            do.sample("two", LARGE, 2, start=do.change("latent_upscale_by", BIGGER, samples=do.sample())), "two", LARGE
        ),
    ),
    "another seed, sampler, schedule and guidance in the second run": Golden(
        {
            "s": sampling(),
            "b": sampling(
                "one",
                "s",
                strength=0.5,
                request={"seed": 99, "sampler": "dpmpp_2m", "schedule": "karras", "cfg": 1.0, "prompt": "a dog"},
            ),
            "d": decoding("b"),
        },
        lambda do: do.decode(
            do.sample(
                first=2, seed=99, schedule=("dpmpp_2m", "karras"), cfg=1.0, start=do.sample(), positive=do.text("a dog")
            )
        ),
    ),
    "another VAE decodes": Golden(
        {"s": sampling(), "d": decoding("s", "two")}, lambda do: do.decode(do.sample(), "two")
    ),
    "the VAE decodes in tiles": Golden(
        {"s": sampling(request={"width": 96, "height": 96}), "d": decoding("s", vae_tile=64)},
        lambda do: do.decode(do.sample(side=96), side=96, tile=64),
    ),
}


def three_samplers(do: Steps) -> Result:
    first = do.sample(part=StepPart(1, keeps_noise=True))
    second = do.sample(
        "two",
        first=1,
        part=StepPart(3, adds_noise=False, keeps_noise=True),
        schedule=("dpmpp_2m", "normal"),
        start=first,
    )
    return do.sample(first=3, part=GOES_ON, schedule=("euler_ancestral", "normal"), start=second)


#: what a run reads besides its latent
CONDITIONS: dict[str, Golden] = {
    "the negative text is zero": Golden(
        {
            "p": text("a cat"),
            "z": operation("encoded_zero", text="p"),
            "s": sampling(inputs={"positive": "p", "negative": "z"}),
            "d": decoding("s"),
        },
        lambda do: do.decode(do.sample(negative=zero(do.text()))),
    ),
    "the text is encoded by another model": Golden(
        {
            "p": text("a cat", "two"),
            "n": text("", is_negative=True),
            "s": sampling(inputs={"positive": "p", "negative": "n"}),
            "d": decoding("s"),
        },
        lambda do: do.decode(do.sample(positive=do.text("a cat", "two"))),
    ),
    "a text is the mean of two": Golden(
        {
            "p": text("a cat"),
            "q": text("a dog"),
            "n": text("", is_negative=True),
            "m": operation("encoded_average", {"strength": 0.5}, first="p", second="q"),
            "s": sampling(inputs={"positive": "m", "negative": "n"}),
            "d": decoding("s"),
        },
        lambda do: do.decode(
            do.sample(
                positive=do.change("encoded_average", {"strength": 0.5}, first=do.text(), second=do.text("a dog"))
            )
        ),
    ),
    "a text behind another, for both": Golden(
        {
            "p": text("a cat"),
            "q": text("a dog", clip_skip=1),
            "m": operation("encoded_concat", first="p", second="q"),
            "n": operation("encoded_concat", first="q", second="p"),
            "s": sampling(inputs={"positive": "m", "negative": "n"}),
            "d": decoding("s"),
        },
        lambda do: do.decode(
            do.sample(
                positive=joined(do.text(), do.text("a dog", clip_skip=1)),
                negative=joined(do.text("a dog", clip_skip=1), do.text()),
            )
        ),
    ),
    "a text node with a LoRA conditions a run without one": Golden(
        {
            "p": text("a cat", loras=["light:0.5"]),
            "n": text("bad", is_negative=True),
            "s": sampling(inputs={"positive": "p", "negative": "n"}),
            "d": decoding("s"),
        },
        lambda do: do.decode(
            do.sample(positive=do.text(loras=(do.lora(strength=0.5),)), negative=do.text("bad", is_negative=True))
        ),
    ),
    "a LoRA on one branch only": Golden(
        {
            "s": sampling(),
            "a": sampling("one", "s", strength=0.5, request={"loras": ["light:0.8"]}),
            "b": sampling("one", "s", strength=0.5),
            "da": decoding("a"),
            "db": decoding("b"),
            "d": operation("image_batch", first="da", second="db"),
        },
        lambda do: batch(
            do.decode(do.sample(first=2, start=do.sample(), loras=(do.lora(strength=0.8),))),
            do.decode(do.sample(first=2, start=do.sample())),
        ),
    ),
    "two LoRAs, in both orders of their branches": Golden(
        {
            "a": sampling(request={"loras": ["light:0.8", "warm:-0.5"]}),
            "b": sampling("one", "a", strength=0.5, request={"loras": ["warm:1.0"]}),
            "d": decoding("b"),
        },
        lambda do: do.decode(
            do.sample(
                first=2,
                loras=(do.lora("warm"),),
                start=do.sample(loras=(do.lora(strength=0.8), do.lora("warm", -0.5))),
            )
        ),
    ),
    "a ControlNet reads a computed image": Golden(
        {
            "e": sampling("two"),
            "i": decoding("e", "two"),
            "v": operation("image_invert", image="i"),
            "s": sampling(inputs={"controls.0": "v"}, request={"controls": [{"model": "canny", "strength": 0.7}]}),
            "d": decoding("s"),
        },
        lambda do: do.decode(
            do.sample(
                conditions=(do.control(strength=0.7),),
                **{"control.0": of_image(do.decode(do.sample("two"), "two"), lambda p: 255 - p)},
            )
        ),
    ),
    "two ControlNets for parts of the steps": Golden(
        {
            **GIVEN,
            "v": operation("image_flip", MIRROR, image="photo"),
            "s": sampling(
                inputs={"controls.0": "photo", "controls.1": "v"},
                request={
                    "controls": [{"model": "canny", "end": 0.5}, {"model": "depth", "start": 0.5, "strength": 0.6}]
                },
            ),
            "d": decoding("s"),
        },
        lambda do: do.decode(
            do.sample(
                conditions=(do.control(end=0.5), do.control("depth", 0.6, 0.5)),
                **{"control.0": ImagePixels(PHOTO), "control.1": of_image(ImagePixels(PHOTO), lambda p: p[:, ::-1])},
            )
        ),
    ),
    "LoRA, ControlNet and mask in one run": Golden(
        {
            **GIVEN,
            "x": encoding("photo"),
            "s": sampling(
                "one",
                "x",
                "half",
                strength=0.75,
                inputs={"controls.0": "photo"},
                request={"loras": ["light:0.6"], "controls": [{"model": "canny"}]},
            ),
            "t": sampling("one", "s", strength=0.5),
            "d": decoding("t"),
        },
        lambda do: do.decode(
            do.sample(
                first=2,
                start=do.sample(
                    first=1,
                    start=do.encode(ImagePixels(PHOTO)),
                    mask=Mask(HALF),
                    loras=(do.lora(strength=0.6),),
                    conditions=(do.control(),),
                    **{"control.0": ImagePixels(PHOTO)},
                ),
            )
        ),
    ),
    "an image prompt of a computed image": Golden(
        {
            "e": sampling("two"),
            "i": decoding("e", "two"),
            "s": sampling(
                inputs={"image_prompts.0": "i"}, request={"image_prompts": [{"model": "resemble", "strength": 0.8}]}
            ),
            "d": decoding("s"),
        },
        lambda do: do.decode(resembling(do, do.decode(do.sample("two"), "two"))),
    ),
    "parts of the image have texts of their own": Golden(
        {
            "s": sampling(
                request={
                    "regions": [
                        {"prompt": "a dog", "box": (0, 0, 32, 64)},
                        {"prompt": "a fish", "box": (32, 0, 32, 64), "strength": 0.5},
                    ]
                }
            ),
            "t": sampling("two", "s", strength=0.5, request={"regions": [{"prompt": "a dog", "mask": HALF}]}),
            "d": decoding("t"),
        },
        lambda do: do.decode(
            do.sample(
                "two",
                first=2,
                conditions=(RegionParams(1.0),),
                start=do.sample(
                    conditions=(RegionParams(1.0, (0, 0, 0.5, 1)), RegionParams(0.5, (0.5, 0, 0.5, 1))),
                    **{"region.0": do.text("a dog"), "region.1": do.text("a fish")},
                ),
                **{"region.0": do.text("a dog", "two"), "region_mask.0": Mask(HALF)},
            )
        ),
    ),
    "an option of one run only": Golden(
        {
            "s": sampling(request={"options": {"freeu": {"b1": 1.2, "b2": 1.3, "s1": 0.9, "s2": 0.2}}}),
            "b": sampling("one", "s", strength=0.5),
            "d": decoding("b"),
        },
        lambda do: do.decode(do.sample(first=2, start=do.sample(options=freeu()))),
    ),
    "no guidance, and no negative text": Golden(
        {"s": sampling(request={"cfg": 1.0, "negative": "bad"}), "d": decoding("s")},
        lambda do: do.decode(do.sample(cfg=1.0)),
    ),
}


def freeu() -> RunOptions:
    request = GenerateRequest(model="one", prompt="", options={"freeu": {"b1": 1.2, "b2": 1.3, "s1": 0.9, "s2": 0.2}})
    return request.run_options


def zero(encoded: Any) -> Any:
    return replace(encoded, context_LD=np.zeros_like(encoded.context_LD))


def joined(first: Any, second: Any) -> Any:
    return replace(first, context_LD=np.concatenate([first.context_LD, second.context_LD]))


def batch(*images: Any, rate: float = 1.0) -> VideoFrames:
    return VideoFrames(np.stack([each.pixels_HWC for each in images]), rate)


def resembling(do: Steps, image: Result) -> Result:
    prompt, states = do.seen(image)
    blank = {}
    if prompt.blank:
        blank = {"image_prompt_blank.0": do.seen(image)[1]}
    return do.sample(conditions=(replace(prompt, strength=0.8),), **{"image_prompt.0": states, **blank})


#: images and masks between runs
IMAGES: dict[str, Golden] = {
    "the image is encoded again by another family": Golden(
        {
            "s": sampling(),
            "e": decoding("s"),
            "x": encoding("e", "xl"),
            "b": sampling("xl", "x", strength=0.5),
            "d": decoding("b", "xl"),
        },
        lambda do: do.decode(do.sample("xl", first=2, start=do.encode(do.decode(do.sample()), "xl")), "xl"),
    ),
    "the image is scaled and inverted in between": Golden(
        {
            "s": sampling(),
            "e": decoding("s"),
            "i": operation("image_invert", image="e"),
            "u": operation("image_scale_by", BIGGER, image="i"),
            "x": encoding("u"),
            "b": sampling("one", "x", strength=0.5),
            "d": decoding("b"),
        },
        lambda do: do.decode(
            do.sample(
                first=2,
                side=LARGE,
                start=do.encode(
                    do.change("image_scale_by", BIGGER, image=of_image(do.decode(do.sample()), lambda p: 255 - p)),
                    side=LARGE,
                ),
            ),
            side=LARGE,
        ),
    ),
    "an upscaler in the middle, and an area of its result": Golden(
        {
            "s": sampling(),
            "e": decoding("s"),
            "u": enlarging("e"),
            "c": operation("image_crop", {"x": 16, "y": 24, "width": LARGE, "height": LARGE}, image="u"),
            "x": encoding("c", "two"),
            "b": sampling("two", "x", strength=0.25),
            "d": decoding("b", "two"),
        },
        lambda do: do.decode(
            do.sample(
                "two",
                LARGE,
                3,
                start=do.encode(
                    of_image(do.upscale(do.decode(do.sample())), lambda p: p[24:120, 16:112]), "two", LARGE
                ),
            ),
            "two",
            LARGE,
        ),
    ),
    "half of the latent is regenerated": Golden(
        {
            "s": sampling(),
            "m": {"kind": "mask", "mask": HALF},
            "b": sampling("two", "s", "m", strength=0.75),
            "d": decoding("b"),
        },
        lambda do: do.decode(do.sample("two", first=1, start=do.sample(), mask=Mask(HALF))),
    ),
    "an image is continued beyond its sides": Golden(
        {
            "s": sampling(),
            "e": decoding("s"),
            "p": operation(
                "image_pad", PAD := {"left": 32, "top": 0, "right": 0, "bottom": 32, "feathering": 8}, image="e"
            ),
            "m": operation("image_pad_mask", PAD, image="e"),
            "x": encoding("p", mask="m"),
            "b": sampling("one", "x", "m"),
            "d": decoding("b"),
        },
        lambda do: continued(do, PAD),
    ),
    "a mask of masks": Golden(
        {
            **GIVEN,
            "r": operation("mask_from_image", {"channel": "red"}, image="photo"),
            "t": operation("mask_threshold", {"level": 0.9}, mask="r"),
            "g": operation("mask_grow", {"pixels": 2, "tapered": False}, mask="t"),
            "b": operation("mask_blur", {"pixels": 1.5}, mask="g"),
            "w": operation("mask_solid", {"width": 32, "height": 32, "level": 0.5}),
            "c": operation("mask_crop", {"x": 8, "y": 0, "width": 32, "height": 64}, mask="b"),
            "k": operation("mask_scale", {"width": 64, "height": 64}, mask="c"),
            "f": operation("mask_feather", {"left": 8, "top": 4, "right": 0, "bottom": 0}, mask="k"),
            "round": operation("mask_radial", {"x": 40, "y": 24}, mask="f"),
            "v": operation("mask_invert", mask="round"),
            "z": operation("mask_composite", {"x": 16, "y": 16, "mode": "subtract"}, destination="v", source="w"),
            "o": operation("mask_from_colour", {"colour": 0x0A141E}, image="q"),
            "q": operation("image_solid", {"width": 64, "height": 64, "colour": 0x0A141E}),
            "y": operation("mask_composite", {"mode": "multiply"}, destination="z", source="o"),
            "x": encoding("photo"),
            "n": sampling("one", "x", "y", strength=0.75),
            "e": decoding("n"),
            "i": operation("mask_to_image", mask="y"),
            "d": operation("image_batch", first="e", second="i"),
        },
        lambda do: masked(do),
    ),
    "one node is read twice": Golden(
        {
            "p": text("a cat"),
            "s": sampling(inputs={"positive": "p", "negative": "p"}),
            "a": operation("latent_add", first="s", second="s"),
            "h": operation("latent_multiply", {"factor": 0.5}, samples="a"),
            "e": decoding("h"),
            "d": operation("image_batch", first="e", second="e"),
        },
        lambda do: batch(*[do.decode(do.sample(negative=do.text()))] * 2),
    ),
    "a filter, and what it is laid over": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "b": operation("image_blur", {"radius": 2, "sigma": 0.7}, image="e"),
            "h": operation("image_sharpen", {"radius": 1, "sigma": 0.5, "alpha": 0.1}, image="b"),
            "q": operation("image_quantize", {"colours": 8, "dither": "bayer-4"}, image="h"),
            "o": operation("image_blend", {"factor": 0.4, "mode": "screen"}, first="e", second="q"),
            "m": {"kind": "mask", "mask": HALF},
            "d": operation("image_composite", {"x": 8, "y": -8}, destination="o", source="e", mask="m"),
        },
        lambda do: overlaid(do),
    ),
    "an image turned, mirrored and turned back is mirrored": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "t": operation("image_rotate", TURN, image="e"),
            "f": operation("image_flip", {"method": "x-axis: vertically"}, image="t"),
            "d": operation("image_rotate", {"rotation": "270 degrees"}, image="f"),
        },
        lambda do: of_image(do.decode(do.sample()), lambda p: p[:, ::-1]),
    ),
    "details, planes, and a frame around": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "c": operation("image_edges", {"low": 0.1, "high": 0.3}, image="e"),
            "m": operation("image_morphology", {"operation": "open", "kernel": 3}, image="e"),
            "n": operation("image_noise", {"seed": 3, "strength": 0.1}, image="m"),
            "t": operation("image_stitch", {"direction": "left", "spacing": 3}, first="n", second="c"),
            "l": operation("image_letterbox", {"width": 64, "height": 64, "colour": "black"}, image="t"),
            "Y": operation("image_plane", {"plane": "Y"}, image="l"),
            "U": operation("image_plane", {"plane": "U"}, image="l"),
            "V": operation("image_plane", {"plane": "V"}, image="l"),
            "o": operation("image_of_planes", Y="Y", U="U", V="V"),
            "a": operation("image_alpha_mask", image="o"),
            "h": {"kind": "mask", "mask": HALF},
            "u": operation("mask_composite", {"mode": "add"}, destination="a", source="h"),
            "d": operation("image_with_alpha", image="o", mask="u"),
        },
        lambda do: detailed(do),
    ),
    "the colours of the negative": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "n": operation("image_invert", image="e"),
            "d": operation("image_match_colours", {"strength": 0.5}, image="e", reference="n"),
        },
        lambda do: of_negative(do),
    ),
    "edits that packs of nodes have": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "p": operation("image_pick", {"indices": (0, 0)}, image="e"),
            "f": operation("image_fit", PACKED["image_fit"], image="p"),
            "c": operation("image_crop_at", PACKED["image_crop_at"], image="f"),
            "h": operation("image_sharpen_adaptive", PACKED["image_sharpen_adaptive"], image="c"),
            "g": operation("image_grey", PACKED["image_grey"], image="h"),
            "m": operation("mask_of_primary", PACKED["mask_of_primary"], image="g"),
            "n": operation("mask_of_near_colour", PACKED["mask_of_near_colour"], image="g"),
            "b": operation("mask_gaussian", PACKED["mask_gaussian"], mask="n"),
            "u": operation("mask_composite", {"mode": "add"}, destination="m", source="b"),
            "o": operation("image_without_alpha", image="g"),
            "t": operation("image_two_levels", {"amount": 0.5}, image="o"),
            "d": operation("image_composite", {}, destination="g", source="t", mask="u"),
        },
        lambda do: packed(do),
    ),
    "a text for each text encoder": Golden(
        {
            "p": text("a cat", "xl"),
            "q": text("a dog", "xl"),
            "a": operation("encoded_of_two", first="p", second="q"),
            "b": operation("encoded_pooled_of", first="a", second="p"),
            "c": operation("encoded_of_three", first="b", second="q", third="a"),
            "s": sampling("xl", inputs={"positive": "a", "negative": "b"}),
            "t": sampling("xl", "s", inputs={"positive": "c", "negative": "q"}, strength=0.5),
            "d": decoding("t", "xl"),
        },
        lambda do: of_encoders(do),
    ),
    "sizes in all ways": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "a": operation("image_scale", {"width": 96, "height": 0, "method": "bicubic"}, image="e"),
            "b": operation("image_scale_to_longest", {"longest": 80, "method": "lanczos"}, image="a"),
            "c": operation("image_scale_within", {"width": 72, "height": 120, "method": "area"}, image="b"),
            "g": operation("image_scale_to_nearest", {"sizes": (64, 96, 96, 64, 64, 64)}, image="c"),
            "h": operation("image_scale_to_pixels", {"megapixels": 0.01, "multiple": 8}, image="g"),
            "d": operation("image_scale", {"width": 64, "height": 128, "crop": True}, image="h"),
        },
        lambda do: sized(do),
    ),
    "a factor for each side, filters, and tokens that are read": Golden(
        {
            "p": text("a cat"),
            "q": operation("encoded_padding", {"least_padding": 0, "least_tokens": 3}, text="p"),
            "n": text("", is_negative=True),
            "s": sampling(inputs={"positive": "q", "negative": "n"}),
            "u": operation("latent_upscale_by_sides", BY_SIDES, samples="s"),
            "t": sampling("one", "u", inputs={"positive": "q", "negative": "n"}, strength=0.5),
            "e": decoding("t"),
            "f": operation("image_scale_by_sides", BY_SIDES, image="e"),
            "d": operation("image_scale_by_filter", FILTERED, image="f"),
        },
        lambda do: scaled_by_sides(do),
    ),
    "light, and sizes of one side, of another image and of multiples": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "a": operation("image_scale_to_shortest", {"shortest": 96, "method": "bicubic"}, image="e"),
            "b": operation("image_brightness", {"factor": 1.25}, image="a"),
            "c": operation("image_contrast", {"factor": 0.5}, image="b"),
            "g": operation("image_scale_like", {"method": "area"}, image="c", like="e"),
            "d": operation("image_scale_to_multiple", {"multiple": 48}, image="g"),
        },
        lambda do: lit(do),
    ),
}


def lit(do: Steps) -> Any:
    image = do.change("image_scale", {"width": 96, "height": 96, "method": "bicubic"}, image=do.decode(do.sample()))
    image = do.change(
        "image_contrast", {"factor": 0.5}, image=do.change("image_brightness", {"factor": 1.25}, image=image)
    )
    image = do.change("image_scale", {"width": SIDE, "height": SIDE, "method": "area"}, image=image)
    return do.change("image_scale", {"width": 48, "height": 48}, image=image)


def scaled_by_sides(do: Steps) -> Any:
    """A text of CLIP has no marks of padding, and stays as it is."""
    latent = do.change("latent_upscale_by", {"factor": 1.5, "method": "nearest-exact"}, samples=do.sample())
    image = do.decode(do.sample("one", LARGE, 2, start=latent), "one", LARGE)
    image = do.change("image_scale", {"width": 144, "height": 144, "method": "nearest-exact"}, image=image)
    large = Image.fromarray(image.pixels_HWC).resize((576, 576), Image.Resampling.BICUBIC)
    return ImagePixels(np.asarray(large.resize((72, 72), Image.Resampling.BICUBIC)))


def continued(do: Steps, pad: Mapping[str, int]) -> Any:
    image = do.decode(do.sample())
    grey = of_image(image, lambda p: np.pad(p, ((0, 32), (32, 0), (0, 0)), constant_values=128))
    mask = do.change("image_pad_mask", pad, image=image)
    return do.decode(do.sample(side=LARGE, start=do.encode(grey, side=LARGE, mask=mask), mask=mask), side=LARGE)


def masked(do: Steps) -> Any:
    red = do.change("mask_threshold", {"level": 0.9}, mask=Mask(np.ascontiguousarray(PHOTO[..., 0])))
    soft = do.change(
        "mask_blur", {"pixels": 1.5}, mask=do.change("mask_grow", {"pixels": 2, "tapered": False}, mask=red)
    )
    part = do.change(
        "mask_scale", {"width": 64, "height": 64}, mask=Mask(np.ascontiguousarray(soft.values_HW[:, 8:40]))
    )
    faded = do.change("mask_feather", {"left": 8, "top": 4, "right": 0, "bottom": 0}, mask=part)
    rounded = do.change("mask_radial", {"x": 40, "y": 24}, mask=faded)
    values = 255 - rounded.values_HW.astype(int)
    values[16:48, 16:48] = np.maximum(values[16:48, 16:48] - 128, 0)
    mask = Mask(values.astype(np.uint8))
    image = do.decode(do.sample(first=1, start=do.encode(ImagePixels(PHOTO)), mask=mask))
    return batch(image, ImagePixels(np.repeat(mask.values_HW[..., None], 3, axis=-1)))


def overlaid(do: Steps) -> Any:
    image = do.decode(do.sample())
    soft = do.change("image_blur", {"radius": 2, "sigma": 0.7}, image=image)
    sharp = do.change("image_sharpen", {"radius": 1, "sigma": 0.5, "alpha": 0.1}, image=soft)
    few = do.change("image_quantize", {"colours": 8, "dither": "bayer-4"}, image=sharp)
    under = do.change("image_blend", {"factor": 0.4, "mode": "screen"}, first=image, second=few)
    found = under.pixels_HWC.copy()
    # the source begins 8 to the right and 8 above; its right half, which the mask shows, is cut off at 64
    found[:56, 40:] = image.pixels_HWC[8:, 32:56]
    return ImagePixels(found)


def detailed(do: Steps) -> Any:
    image = do.decode(do.sample())
    edges = do.change("image_edges", {"low": 0.1, "high": 0.3}, image=image)
    opened = do.change("image_morphology", {"operation": "open", "kernel": 3}, image=image)
    noisy = do.change("image_noise", {"seed": 3, "strength": 0.1}, image=opened)
    space = np.full((SIDE, 4, 3), 255, np.uint8)
    both = ImagePixels(np.concatenate([edges.pixels_HWC, space, noisy.pixels_HWC], axis=1))
    framed = do.change("image_letterbox", {"width": 64, "height": 64, "colour": "black"}, image=both)
    planes = {plane: do.change("image_plane", {"plane": plane}, image=framed) for plane in "YUV"}
    colours = do.change("image_of_planes", **planes)
    return ImagePixels(np.concatenate([colours.pixels_HWC, 255 - HALF[..., None]], axis=-1))


def of_negative(do: Steps) -> Any:
    image = do.decode(do.sample())
    negative = ImagePixels(255 - image.pixels_HWC)
    return do.change("image_match_colours", {"strength": 0.5}, image=image, reference=negative)


def packed(do: Steps) -> Any:
    image = do.change("image_pick", {"indices": (0, 0)}, image=do.decode(do.sample()))
    for name in ("image_fit", "image_crop_at", "image_sharpen_adaptive", "image_grey"):
        image = do.change(name, PACKED[name], image=image)
    primary, near = (do.change(name, PACKED[name], image=image) for name in ("mask_of_primary", "mask_of_near_colour"))
    near = do.change("mask_gaussian", PACKED["mask_gaussian"], mask=near)
    mask = do.change("mask_composite", {"mode": "add"}, destination=primary, source=near)
    white = do.change("image_two_levels", {"amount": 0.5}, image=image)
    return do.change("image_composite", {}, destination=image, source=white, mask=mask)


def of_encoders(do: Steps) -> Any:
    cat, dog = do.text(model="xl"), do.text("a dog", "xl")
    width = cat.context_LD.shape[-1] - cat.pooled_V.shape[-1]
    states = np.concatenate([cat.context_LD[:, :width], dog.context_LD[:, width:]], axis=-1)
    both, mixed = replace(dog, context_LD=states), replace(cat, context_LD=states)
    three = do.change("encoded_of_three", first=mixed, second=dog, third=both)
    first = do.sample("xl", positive=both, negative=mixed)
    return do.decode(do.sample("xl", first=STEPS // 2, start=first, positive=three, negative=dog), "xl")


def sized(do: Steps) -> Any:
    image = do.change("image_scale", {"width": 96, "height": 96, "method": "bicubic"}, image=do.decode(do.sample()))
    image = do.change("image_scale", {"width": 80, "height": 80, "method": "lanczos"}, image=image)
    image = do.change("image_scale", {"width": 72, "height": 72, "method": "area"}, image=image)
    image = do.change("image_scale", {"width": 64, "height": 64}, image=image)
    image = do.change("image_scale", {"width": 104, "height": 104}, image=image)  # sqrt(0.01 * 2^20) is 102.4
    return do.change("image_scale", {"width": 64, "height": 128}, image=of_image(image, lambda p: p[:, 26:78]))


#: latents between runs
LATENTS: dict[str, Golden] = {
    "latents turned, mirrored, cut and laid over another": Golden(
        {
            "s": sampling(request={"width": 128, "height": 128}),
            "t": operation("latent_rotate", TURN, samples="s"),
            "f": operation("latent_flip", {"method": "x-axis: vertically"}, samples="t"),
            "c": operation("latent_crop", {"x": 16, "y": 32, "width": 64, "height": 64}, samples="f"),
            "o": sampling("two"),
            "p": operation(
                "latent_composite", {"x": 16, "y": 24, "feather": 16}, destination="o", source="c", mask="half"
            ),
            **GIVEN,
            "b": sampling("one", "p", strength=0.5),
            "d": decoding("b"),
        },
        lambda do: do.decode(do.sample(first=2, start=laid_over(do))),
    ),
    "latents are added, subtracted and mixed": Golden(
        {
            "s": sampling(),
            "o": sampling("two", request={"seed": 8}),
            "a": operation("latent_add", first="s", second="o"),
            "b": operation("latent_subtract", first="a", second="o"),
            "c": operation("latent_blend", {"ratio": 0.25}, first="b", second="o"),
            "g": operation("latent_interpolate", {"ratio": 0.75}, first="c", second="s"),
            "n": sampling("one", "g", strength=0.5),
            "d": decoding("n"),
        },
        lambda do: do.decode(do.sample(first=2, start=mixed(do))),
    ),
    "latents are scaled in all ways": Golden(
        {
            "s": sampling(),
            "a": operation("latent_upscale", {"width": 12, "height": 10, "method": "nearest-exact"}, samples="s"),
            "b": operation("latent_upscale_to_pixels", {"width": 96, "height": 96, "method": "bislerp"}, samples="a"),
            "n": sampling("one", "b", first_step=3),
            "d": decoding("n"),
        },
        lambda do: do.decode(
            do.sample(
                side=LARGE,
                first=3,
                start=do.change(
                    "latent_upscale",
                    {"width": 12, "height": 12, "method": "bislerp"},
                    samples=do.change(
                        "latent_upscale", {"width": 12, "height": 10, "method": "nearest-exact"}, samples=do.sample()
                    ),
                ),
            ),
            side=LARGE,
        ),
    ),
    "an empty latent under another": Golden(
        {
            "s": sampling(),
            "z": operation("latent_empty", {"channels": 4, "width": 12, "height": 12}),
            "p": operation("latent_composite", {"x": 16, "y": 16}, destination="z", source="s"),
            "n": sampling("one", "p", strength=0.75),
            "d": decoding("n"),
        },
        lambda do: do.decode(
            do.sample(side=LARGE, first=1, start=of_latent(do.sample(), lambda x: np.pad(x, ((0, 0), (2, 2), (2, 2))))),
            side=LARGE,
        ),
    ),
    "shared parts in two branches of two models": Golden(
        {
            "s": sampling(),
            "e": decoding("s"),
            "x": encoding("e", "xl"),
            "l": sampling("xl", "x", strength=0.5),
            "le": decoding("l", "xl"),
            "r": sampling("two", "s", strength=0.5),
            "re": decoding("r"),
            "o": operation("image_blend", {"factor": 0.5}, first="le", second="re"),
            "d": operation("image_blend", {"factor": 0.25, "mode": "difference"}, first="o", second="e"),
        },
        lambda do: branches(do),
    ),
}


def laid_over(do: Steps) -> Latent:
    large, under = do.sample(side=128), do.sample("two")
    turned = of_latent(large, lambda x: np.rot90(x, -1, (-2, -1))[:, ::-1])
    part = of_latent(turned, lambda x: x[:, 4:12, 2:10])
    share = np.repeat([[0.0, 1.0]], 8, axis=0).repeat(4, axis=1)  # the mask, 8 cells a side
    fade = np.ones((8, 8))
    fade[:2] *= np.array([0.5, 1.0])[:, None]  # the upper and the left side lie inside
    fade[:, :2] *= np.array([0.5, 1.0])
    share = (share * fade)[:5, :6]
    found = under.samples_CHW.copy()
    found[:, 3:, 2:] = part.samples_CHW[:, :5, :6] * share + found[:, 3:, 2:] * (1 - share)
    return replace(under, samples_CHW=found)


def mixed(do: Steps) -> Any:
    one, other = do.sample(), do.sample("two", seed=8)
    # sums are taken in the VAE's scale, and rounded there
    added = do.change("latent_add", first=one, second=other)
    less = do.change("latent_subtract", first=added, second=other)
    blended = do.change("latent_blend", {"ratio": 0.25}, first=less, second=other)
    return do.change("latent_interpolate", {"ratio": 0.75}, first=blended, second=one)


def branches(do: Steps) -> Any:
    base = do.sample()
    image = do.decode(base)
    left = do.decode(do.sample("xl", first=2, start=do.encode(image, "xl")), "xl")
    right = do.decode(do.sample("two", first=2, start=base))
    both = do.change("image_blend", {"factor": 0.5}, first=left, second=right)
    return do.change("image_blend", {"factor": 0.25, "mode": "difference"}, first=both, second=image)


FILM = {"frames": FRAMES, "frame_rate": FRAME_RATE}
SOUND = {"width": None, "height": None, "seconds": SECONDS, "sampler": "dpmpp_2m", "schedule": "exponential"}
#: batches, videos and audio
TIMED: dict[str, Golden] = {
    "a batch of images with a seed each": Golden(
        {
            **{f"s{seed}": sampling(request={"seed": seed}) for seed in (7, 8, 9)},
            **{f"e{seed}": decoding(f"s{seed}") for seed in (7, 8, 9)},
            "b": operation("image_batch", first="e7", second="e8"),
            "c": operation("image_batch", first="b", second="e9"),
            "d": operation("video_of_images", {"rate": 4.0}, image="c"),
        },
        lambda do: batch(*(do.decode(do.sample(seed=seed)) for seed in (7, 8, 9)), rate=4.0),
    ),
    "some images of a batch, repeated": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "i": operation("image_invert", image="e"),
            "b": operation("image_batch", first="e", second="i"),
            "f": operation("image_from_batch", {"start": 1, "length": 1}, image="b"),
            "d": operation("image_repeat", {"amount": 3}, image="f"),
        },
        lambda do: batch(*[of_image(do.decode(do.sample()), lambda p: 255 - p)] * 3),
    ),
    "frames there and back": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "i": operation("image_invert", image="e"),
            "b": operation("image_batch", first="e", second="i"),
            "c": operation("image_batch", first="b", second="e"),
            "d": operation("image_there_and_back", image="c"),
        },
        lambda do: batch(*[do.decode(do.sample()), of_image(do.decode(do.sample()), lambda p: 255 - p)] * 2),
    ),
    "a video": Golden(
        {"s": sampling(VIDEO, request=FILM), "d": decoding("s", VIDEO)},
        lambda do: do.decode(do.sample(VIDEO, shape=MOVIE), VIDEO, shape=MOVIE),
    ),
    "a video that is changed and denoised again": Golden(
        {
            "s": sampling(VIDEO, request=FILM),
            "f": operation("latent_flip", MIRROR, samples="s"),
            "b": sampling(VIDEO, "f", strength=0.5, request=FILM),
            "e": decoding("b", VIDEO),
            "d": operation("image_invert", image="e"),
        },
        lambda do: inverted(
            do.decode(
                do.sample(
                    VIDEO,
                    shape=MOVIE,
                    first=2,
                    start=of_latent(do.sample(VIDEO, shape=MOVIE), lambda x: x[..., ::-1]),
                ),
                VIDEO,
                shape=MOVIE,
            )
        ),
    ),
    "the first part of the latent of a video": Golden(
        {
            "s": sampling(VIDEO, request=FILM),
            "f": operation("latent_frames", {"start": 0, "length": 1}, samples="s"),
            "d": decoding("f", VIDEO),
        },
        lambda do: do.decode(
            of_latent(do.sample(VIDEO, shape=MOVIE), lambda x: x[:, :1]), VIDEO, shape=replace(MOVIE, frames=1)
        ),
    ),
    "a video of a computed image": Golden(
        {
            "e": sampling(),
            "i": decoding("e"),
            "s": {
                "kind": "sample",
                "request": {"model": SHOWN, "steps": STEPS, "frames": 3, "motion": 100, "cfg": 3.0, "sampler": "euler"},
                "inputs": {"image": "i"},
            },
            "d": decoding("s", SHOWN),
        },
        lambda do: shown(do, do.decode(do.sample())),
    ),
    "audio": Golden(
        {"s": sampling(AUDIO, request=SOUND), "d": decoding("s", AUDIO)},
        lambda do: sound(do),
    ),
    "audio that is put together": Golden(
        {
            "s": sampling(AUDIO, request=SOUND),
            "e": decoding("s", AUDIO),
            "z": operation("audio_silence", {"seconds": 0.01}),
            "c": operation("audio_concat", first="z", second="e"),
            "t": operation("audio_trim", {"start": 0.005, "seconds": 0.05}, audio="c"),
            "v": operation("audio_volume", {"decibels": -6.0}, audio="t"),
            "d": operation("audio_merge", first="v", second="t"),
        },
        lambda do: put_together(sound(do)),
    ),
    "a video with the sound of another model": Golden(
        {
            **BASE,
            "e": BASE["d"],
            "i": operation("image_invert", image="e"),
            "b": operation("image_batch", first="e", second="i"),
            "a": sampling(AUDIO, request=SOUND),
            "u": decoding("a", AUDIO),
            "d": operation("video_of_images", {"rate": 8.0}, image="b", sound="u"),
        },
        lambda do: VideoFrames(
            batch(image := do.decode(do.sample()), of_image(image, lambda p: 255 - p)).frames_THWC, 8.0, sound(do)
        ),
    ),
}


def inverted(video: VideoFrames) -> VideoFrames:
    return replace(video, frames_THWC=255 - video.frames_THWC)


def shown(do: Steps, image: Result) -> Any:
    model, shape = do.catalog.find_model(SHOWN), OutputShape(SIDE, SIDE, 3, 7.0)
    first = do.encode(image, SHOWN, noise=0.02, seed=SEED)
    embeds = do.run(VisionEncodeParams(model), **{"image.0": image})
    latent = do.sample(
        SHOWN, shape=shape, schedule=("euler", "karras"), cfg=3.0, reads_text=False, image_cfg=0.0,
        conditions=(ImageCondition(0, 0.02, 100),), image=first, image_embeds=embeds,
    )  # fmt: skip
    return do.decode(latent, SHOWN, shape=shape)


def sound(do: Steps) -> Any:
    return do.decode(do.sample(AUDIO, shape=CLIP, schedule=("dpmpp_2m", "exponential")), AUDIO, shape=CLIP)


def put_together(clip: AudioSamples) -> AudioSamples:
    behind = np.concatenate([np.zeros((441, 2), np.float32), clip.samples_SC])
    begin = int(0.005 * AUDIO_RATE)
    part = behind[begin : begin + int(0.05 * AUDIO_RATE)]
    found = part * np.float32(10 ** (-6 / 20)) + part
    most = np.abs(found).max()
    return AudioSamples(found / most if most > 1 else found, AUDIO_RATE)


GROUPS = {"chains": CHAINS, "conditions": CONDITIONS, "images": IMAGES, "latents": LATENTS, "timed": TIMED}
GOLDENS: dict[str, Golden] = {name: golden for group in GROUPS.values() for name, golden in group.items()}
#: graphs that make what another one makes
SAME_OUTPUT = {
    "a run that stops and goes on is one run": "one sampling run",
}
