"""Workflows in which one node of any kind is used with all its inputs, and what changes of single inputs do to them.

A workflow that compiles is what the pool is asked for; a warning is what a user is told. A change of an input that
leads to neither another request, nor a warning with its name, nor a refusal, is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    AUDIOS,
    CONTROLNETS,
    GLIGENS,
    IMAGES,
    LORAS,
    MODELS,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    STYLES,
    TEXT_ENCODERS,
    UPSCALERS,
    VAES,
    VIDEOS,
    VISION_ENCODERS,
    WIDGET_TYPES,
    NodeInput,
    NodeType,
)
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_request_fields import NO_GUIDANCE, OF_UNETS
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import node

#: inputs that are counted in cells
_CELLS = ("width", "height", "length")
#: the node under test
SUBJECT = "subject"
FILES = FileNames(controlnets=("canny", "depth"), upscalers=("4x", "2x"), image_prompts=("redux", "other"),
                  gligens=("boxes", "others"))  # fmt: skip
_WIDE = ("a.png", "b.png")
#: two names of each list of the pool
NAMED = {
    MODELS: ("one", "two"), LORAS: ("light", "dark"), IMAGES: _WIDE, SAMPLER_NAMES: ("euler", "heun"),
    SCHEDULE_NAMES: ("normal", "karras"), CONTROLNETS: FILES.controlnets, UPSCALERS: FILES.upscalers,
    STYLES: FILES.image_prompts, GLIGENS: FILES.gligens, VAES: ("a", "b"), TEXT_ENCODERS: ("a", "b"),
    VISION_ENCODERS: ("a", "b"), VIDEOS: ("a", "b"), AUDIOS: ("a", "b"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """What a node is used with: the title of the family of its models, the scale of guidance, where latents come from
    ("blank", "encoded" or "sampled"), how much of them is denoised, and whether conditioning is the "positive" text,
    the "negative" one, or "both" with another text."""

    family: str
    cfg: float = 4.0
    latent: str = "blank"
    denoise: float = 1.0
    text: str = "positive"

    @property
    def names(self) -> PoolNames:
        """The names of the pool."""
        return PoolNames(
            dict.fromkeys(NAMED[MODELS], self.family),
            NAMED[LORAS],
            _WIDE,
            FILES,
            image_size=lambda name: _SIZES[name],
        )


_SIZES = {"a.png": (64, 64), "b.png": (96, 64)}


def photo(name: str) -> Image.Image:
    """An image of the user."""
    shade = 40 if name == "a.png" else 90
    down = Image.linear_gradient("L").resize(_SIZES[name]).point(lambda level: (level * 3 + shade) % 256)
    across = Image.linear_gradient("L").rotate(90).resize(_SIZES[name]).point(lambda level: (level * 5) % 256)
    return Image.merge("RGBA", (down, across, down, across))


@dataclass(slots=True)
class Maker:
    """Adds nodes to a workflow."""

    setting: Setting
    graph: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, **inputs: Any) -> list[Any]:
        """Add a node, and return a link to its first output."""
        node_id = f"{kind} {len(self.graph)}"
        self.graph[node_id] = node(kind, **inputs)
        return [node_id, 0]

    def model(self, place: int = 0) -> str:
        """Return the checkpoint at a place, which is added once."""
        name = f"model {place}"
        self.graph.setdefault(name, node("CheckpointLoaderSimple", ckpt_name=NAMED[MODELS][place]))
        return name

    def text(self, place: int = 0) -> list[Any]:
        return self.add("CLIPTextEncode", clip=[self.model(), 1], text=("a fox", "a hare")[place])

    def blank(self, place: int = 0) -> list[Any]:
        return self.add("EmptyLatentImage", width=(64, 128)[place], height=64, batch_size=1)

    def image(self, place: int = 0) -> list[Any]:
        return self.add("LoadImage", image=_WIDE[place])

    def sampled(self, **inputs: Any) -> list[Any]:
        """Return the latents of a sampler."""
        given = {"model": [self.model(), 0], "positive": self.text(), "negative": self.text(1), "seed": 7, "steps": 8}
        given |= {"cfg": self.setting.cfg, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
        given = {"latent_image": self.blank(), **given, **inputs}
        return self.add("KSampler", **given)

    def saved(self, latent: list[Any], vae: list[Any] | None = None) -> None:
        decoded = self.add("VAEDecode", samples=latent, vae=vae or [self.model(), 2])
        self.add("SaveImage", images=decoded, filename_prefix="x")

    def latent(self, place: int = 0) -> list[Any]:
        match self.setting.latent:
            case "blank":
                return self.blank(place)
            case "encoded":
                return self.add("VAEEncode", pixels=self.image(place), vae=[self.model(), 2])
        return self.sampled(seed=place)

    def parts(self, **given: Any) -> None:
        """Add a sampler of parts."""
        makers = {
            name.lower(): maker for name, maker in PROVIDERS.items() if name in ("NOISE", "GUIDER", "SAMPLER", "SIGMAS")
        }
        found = {name: given.get(name) or make(self, 0) for name, make in makers.items()}
        self.saved(self.add("SamplerCustomAdvanced", latent_image=self.blank(), **found))


def _of_model(slot: int) -> Callable[[Maker, int], list[Any]]:
    return lambda make, place: [make.model(place), slot]


def _mask(make: Maker, place: int) -> list[Any]:
    return [make.image(place)[0], 1]


def _guider(make: Maker, place: int) -> list[Any]:
    texts = {"positive": make.text(place), "negative": make.text(1)}
    return make.add("CFGGuider", model=[make.model(), 0], cfg=make.setting.cfg, **texts)


def _levels(make: Maker, place: int) -> list[Any]:
    return make.add("BasicScheduler", model=[make.model(), 0], scheduler="normal", steps=8 + place, denoise=1.0)


def _audio(make: Maker, place: int) -> list[Any]:
    return make.add("VAEDecodeAudio", samples=make.sampled(seed=place), vae=[make.model(), 2])


def _video(make: Maker, place: int) -> list[Any]:
    return make.add("CreateVideo", images=make.image(place), fps=8.0)


#: a node with an output of a type, at one of two places: they differ
PROVIDERS: Mapping[str, Callable[[Maker, int], list[Any]]] = {
    "MODEL": _of_model(0), "CLIP": _of_model(1), "VAE": _of_model(2), "CONDITIONING": Maker.text,
    "LATENT": Maker.latent, "IMAGE": Maker.image, "MASK": _mask, "GUIDER": _guider, "SIGMAS": _levels,
    "AUDIO": _audio, "VIDEO": _video,
    "CONTROL_NET": lambda make, place: make.add("ControlNetLoader", control_net_name=NAMED[CONTROLNETS][place]),
    "UPSCALE_MODEL": lambda make, place: make.add("UpscaleModelLoader", model_name=NAMED[UPSCALERS][place]),
    "GLIGEN": lambda make, place: make.add("GLIGENLoader", gligen_name=NAMED[GLIGENS][place]),
    "STYLE_MODEL": lambda make, place: make.add("StyleModelLoader", style_model_name=NAMED[STYLES][place]),
    "CLIP_VISION": lambda make, place: make.add("CLIPVisionLoader", clip_name=NAMED[VISION_ENCODERS][place]),
    "CLIP_VISION_OUTPUT": lambda make, place: make.add(
        "CLIPVisionEncode", clip_vision=PROVIDERS["CLIP_VISION"](make, 0), image=make.image(place), crop="center"),
    "NOISE": lambda make, place: make.add("RandomNoise", noise_seed=place),
    "SAMPLER": lambda make, place: make.add("KSamplerSelect", sampler_name=NAMED[SAMPLER_NAMES][place]),
    "LATENT_OPERATION": lambda make, place: make.add("LatentOperationTonemapReinhard", multiplier=1.0 + place),
    "IPADAPTER": lambda make, place: make.add("IPAdapterModelLoader", ipadapter_file=NAMED[STYLES][place]),
    "MODEL_PATCH": lambda make, place: make.add("ModelPatchLoader", name=NAMED[CONTROLNETS][place]),
    ANY: lambda make, place: make.add("PrimitiveFloat", value=2.0 + place),
    "LORA_STACK": lambda make, place: _stack(make, place),
    "PIPE_LINE": lambda make, place: _pipe(make, place),
}  # fmt: skip


def _whole(make: Maker) -> dict[str, Any]:
    return {"model": [make.model(), 0], "clip": [make.model(), 1]}


def _stack(make: Maker, place: int) -> list[Any]:
    return make.add("CR LoRA Stack", switch_1="On", lora_name_1=NAMED[LORAS][place])


def _pipe(make: Maker, place: int) -> list[Any]:
    """A pipe with the settings of a sampler."""
    loader = make.add("easy comfyLoader", ckpt_name=NAMED[MODELS][0], clip_skip=-2, negative="",
                      positive=("a fox", "a hare")[place], resolution=("96 x 64", "64 x 96")[place])  # fmt: skip
    return make.add("easy preSampling", pipe=loader, steps=4 + place, seed=3)


def _consume(make: Maker, made: str, source: list[Any]) -> None:
    """Add nodes that lead from an output to an image, a video or a sound that is saved."""
    match made:
        case "MODEL":
            make.saved(make.sampled(model=source))
        case "CLIP":
            make.saved(make.sampled(positive=make.add("CLIPTextEncode", clip=source, text="a fox")))
        case "VAE":
            make.saved(make.sampled(), source)
        case "CONDITIONING":
            other = {"both": lambda: make.add("ConditioningCombine", conditioning_1=source, conditioning_2=make.text())}
            source = other.get(make.setting.text, lambda: source)()
            make.saved(make.sampled(**{"negative" if make.setting.text == "negative" else "positive": source}))
        case "LATENT":
            make.saved(make.sampled(latent_image=source, denoise=make.setting.denoise))
        case "IMAGE":
            make.add("SaveImage", images=source, filename_prefix="x")
        case "MASK":
            encoded = make.add("VAEEncode", pixels=make.image(), vae=[make.model(), 2])
            masked = make.add("SetLatentNoiseMask", samples=encoded, mask=source)
            make.saved(make.sampled(latent_image=masked, denoise=0.5))
        case "INT":
            make.saved(make.sampled(seed=source))
        case "FLOAT" | "*":
            make.saved(make.sampled(cfg=source))
        case "STRING":
            make.saved(make.sampled(positive=make.add("CLIPTextEncode", clip=[make.model(), 1], text=source)))
        case "BOOLEAN":
            text = make.add("PrimitiveString", value="a"), make.add("PrimitiveString", value="b")
            chosen = make.add("ComfySwitchNode", switch=source, on_false=text[0], on_true=text[1])
            _consume(make, "STRING", chosen)
        case "VIDEO":
            make.add("SaveVideo", video=source, filename_prefix="x", format="auto", codec="auto")
        case "AUDIO":
            make.add("SaveAudio", audio=source, filename_prefix="x")
        case "NOISE" | "GUIDER" | "SAMPLER" | "SIGMAS":
            make.parts(**{made.lower(): source})
        case "CONTROL_NET":
            use = {"conditioning": make.text(), "control_net": source, "image": make.image(), "strength": 1.0}
            _consume(make, "CONDITIONING", make.add("ControlNetApply", **use))
        case "UPSCALE_MODEL":
            decoded = make.add("VAEDecode", samples=make.sampled(), vae=[make.model(), 2])
            _consume(make, "IMAGE", make.add("ImageUpscaleWithModel", upscale_model=source, image=decoded))
        case "GLIGEN":
            box = {"width": 32, "height": 32, "x": 0, "y": 0, "text": "a fox", "clip": [make.model(), 1]}
            applied = make.add("GLIGENTextBoxApply", conditioning_to=make.text(), gligen_textbox_model=source, **box)
            _consume(make, "CONDITIONING", applied)
        case "STYLE_MODEL" | "CLIP_VISION_OUTPUT":
            use = {name: PROVIDERS[name.upper()](make, 0) for name in ("style_model", "clip_vision_output")}
            use = {**use, made.lower(): source, "conditioning": make.text(), "strength": 1.0}
            _consume(make, "CONDITIONING", make.add("StyleModelApply", **use, strength_type="multiply"))
        case "CLIP_VISION":
            seen = make.add("CLIPVisionEncode", clip_vision=source, image=make.image(), crop="center")
            _consume(make, "CLIP_VISION_OUTPUT", seen)
        case "LATENT_OPERATION":
            model = make.add("LatentApplyOperationCFG", model=[make.model(), 0], operation=source)
            _consume(make, "MODEL", model)
        case "MODEL_PATCH":
            use = {"model": [make.model(), 0], "model_patch": source, "vae": [make.model(), 2], "strength": 1.0}
            _consume(make, "MODEL", make.add("ZImageFunControlnet", **use, image=make.image()))
        case "IPADAPTER":
            use = {"model": [make.model(), 0], "ipadapter": source, "image": make.image()}
            _consume(make, "MODEL", make.add("IPAdapter", **use, weight=1.0, start_at=0.0, end_at=1.0))
        case "LORA_STACK":
            used = make.add("CR Apply LoRA Stack", **_whole(make), lora_stack=source)
            text = make.add("CLIPTextEncode", clip=[used[0], 1], text="a fox")
            make.saved(make.sampled(model=used, positive=text))
        case "PIPE_LINE":
            is_set = make.graph[SUBJECT]["class_type"] == "easy preSampling"
            pipe = source if is_set else make.add("easy preSampling", pipe=source, steps=5, seed=3)
            make.add("easy kSampler", pipe=pipe)
        case "METADATA":
            make.add("Image Saver Simple", images=make.image(), metadata=source)
        case "DEPENDENCIES" | "BOX":  # of nodes that are not here
            pass
        case _:
            raise AssertionError(f"{made}: nothing reads it")


def value_of(given: NodeInput) -> Any:
    """A value that an input accepts."""
    if isinstance(given.choices, str) and given.choices in NAMED and given.default is None:
        return NAMED[given.choices][0]
    return given.default if given.default not in (None, "") else "a text"


def other_values(given: NodeInput, value: Any) -> list[Any]:
    """Legal values of a widget that are not `value`: near to it first, then far from it, and at its ends."""
    found: list[Any]
    match given.type:
        case "INT":  # parts of a cell of pixels, or of frames, are cut off
            near = 64 if given.name.endswith(_CELLS) else 1
            found = [value + near, value - near, given.least, given.most, value + 64]
        case "FLOAT":
            up, down = (given.most - value) * 0.25, (value - given.least) * 0.2
            found = [value + up, value - down, given.least, given.most]
        case "BOOLEAN":
            found = [not value]
        case _ if isinstance(given.choices, str) and given.choices in NAMED:
            found = list(NAMED[given.choices])
        case _:
            found = [*given.choices, *(() if given.type == "COMBO" else ("another text", ""))]
    legal = [each for each in dict.fromkeys(found) if each != value]
    if given.type in ("INT", "FLOAT"):
        legal = [each for each in legal if given.least <= each <= given.most]
    return legal


def changes_of(
    kind: NodeType, setting: Setting, base: Mapping[str, Any], others: Mapping[str, list[Any]]
) -> tuple[dict[str, Any], Iterator[tuple[str, Any, dict[str, Any]]]]:
    """Return a workflow with a node, and the workflows in which one of its inputs is another: its name, the value,
    and the workflow. A link has another source, or none, if it is optional."""
    make = Maker(setting)
    inputs: dict[str, Any] = {}
    for given in kind.inputs:
        if given.name in base:
            value = base[given.name]
            if value is not None:
                inputs[given.name] = value(make, 0) if callable(value) else value
        else:
            is_widget = given.type in WIDGET_TYPES
            inputs[given.name] = value_of(given) if is_widget else PROVIDERS[given.type](make, 0)
    make.graph[SUBJECT] = node(kind.name, **inputs)
    for slot, made in enumerate(kind.outputs):
        _consume(make, made, [SUBJECT, slot])
    first = dict(make.graph)

    def changed(name: str, value: Any) -> dict[str, Any]:
        left = {key: each for key, each in inputs.items() if key != name}
        return {**make.graph, SUBJECT: node(kind.name, **left, **({} if value is None else {name: value}))}

    def changes() -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for given in kind.inputs:
            if given.type in WIDGET_TYPES:
                value = inputs.get(given.name)
                if value is None:
                    continue
                if isinstance(value, list):
                    continue
                for each in others.get(given.name, other_values(given, value)):
                    yield given.name, each, changed(given.name, each)
                continue
            provide = base.get(given.name)
            provide = provide if callable(provide) else PROVIDERS[given.type]
            make.graph = dict(first)
            yield given.name, "another", changed(given.name, provide(make, 1))
            if not given.is_required and given.name in inputs:
                yield given.name, "none", changed(given.name, None)

    return first, changes()


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a workflow is for the pool: requests and warnings, or the refusal."""

    requests: tuple[Any, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str = ""

    def tells(self, name: str, before: Meaning) -> bool:
        """Whether this is another request than before, is refused, or has a warning with the name of an input."""
        if self.refusal or self.requests != before.requests:
            return True
        told = {*self.warnings, *before.warnings}
        known = (name, ": negative: found another", NO_GUIDANCE, OF_UNETS)
        return any(text in warning for warning in told for text in known)


def meaning(graph: Mapping[str, Any], setting: Setting) -> Meaning:
    """Return what a workflow is for the pool."""
    names = setting.names
    try:
        outputs = outputs_of(graph, names)
        made = tuple(request for output in outputs for request in requests_of(output, names, photo))
    except UserError as refused:
        return Meaning(refusal=str(refused))
    return Meaning(made, tuple(warning for output in outputs for warning in output.warnings))


#: nodes that make something: others show it in the editor, and are not read
MAKING = [kind for kind in NODE_TYPES.values() if kind.outputs or kind.is_output]
