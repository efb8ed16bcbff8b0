"""Random recipes and requests, and digests of everything that follows from them: `tests/golden/recipes.json` has the
results of an earlier version. `tests.actors.graph.test_random_recipes` compares.

Record anew with `python -m tests.actors.graph.random_recipes`, and only if outputs are meant to change.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelpool.actors.cli.models.recipe_table import recipe_facts
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.recipe_request import differing_fields, requests_of
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.control_video_fields import InputVideo
from modelpool.actors.request.face_fields import InputFaces
from modelpool.actors.request.image_fields import InputImage
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.control_video_models import takes_control_video
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.refs import FoundImagePrompt, ImagePromptRef, ModelRef
from modelpool.pool.values.core.sampling_facts import ModelDefaults, ReferenceMode, SamplingFacts
from modelpool.pool.values.core.stage_params import image_prompt_key
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, JobId, Role
from tests.actors.fakes import MIB, SAMPLING, FakeCatalog, FakeImagePrompts, component_key, sha

GOLDEN = Path(__file__).parents[2] / "golden" / "recipes.json"
RECIPES, REQUESTS = 300, 2400
COMMIT = "@" + "0a" * 20

#: fields of a recipe in JSON: those of the first version, then those that were added, with values that were recorded
FIRST: Mapping[str, tuple[Any, ...]] = {
    "model": ("shapes", f"org/m/m.safetensors{COMMIT}"),
    "model_sha256": ("ab", "cd"),
    "prompt": ("a red circle", ""),
    "negative": ("", "blue"),
    "steps": (20, 4),
    "cfg": (5.0, 1.0),
    "sampler": ("euler", "dpmpp_2m"),
    "schedule": ("normal", "karras"),
    "width": (64, 512),
    "height": (64, 768),
    "seed": (1, 2**64 - 1),
}
LATER: Mapping[str, tuple[Any, ...]] = {
    "frames": (5, 17),
    "frame_rate": (8.0, 23.976),
    "motion": (127,),
    "image_noise": (0.02,),
    "elevation": (10.0, -5.5),
    "seconds": (2.0,),
    "format": ("webm", "webp", "mp4"),
    "quality": (80,),
    "clip_skip": (1,),
    "embeddings": ([["worn", "ab"]], [["worn", "ab"], ["old", "cd"]]),
    "decoder": ({"model": f"large{COMMIT}", "sha256": "ef", "steps": 10, "cfg": 1.1},),
    "noise": ({"eta": 0.5, "s_noise": 1.01, "s_churn": 2.0}, {"eta": None, "s_noise": 1.0, "s_churn": 0.5}),
    "view": (
        {"azimuth": 30.0, "elevation": -10.0, "camera_distance": 0.25, "image_elevation": None},
        {"azimuth": 0.0, "elevation": 0.0, "camera_distance": 0.0, "image_elevation": 0.0},
    ),
    "low_noise": ({"boundary": 0.875, "cfg": 3.0},),
    "upscale": (
        {"model": f"org/4x.pth{COMMIT}", "sha256": "ef", "scale": 4.0, "tile": 0, "overlap": 0},
        {"model": "double", "sha256": "ef", "scale": 1.5, "tile": 256, "overlap": 16},
    ),
    "options": ({"pag": {"scale": 3.0}}, {"slg": {"layers": [7, 8], "scale": 2.0, "start": 0.01, "end": 0.2}}),
    "lyrics": ("[verse]\nla la",),
    "lyrics_language": ("de",),
    "bpm": (96,),
    "key_scale": ("C major",),
    "time_signature": ("6/8",),
    "shift": (3.1,),
    "computed_by": ({"precision": "fp8"},),
}
LORA: Mapping[str, tuple[Any, ...]] = {
    "noise": ("high", "low"),
    "text_strength": (0.0, 0.25),
    "start": (0.25,),
    "end": (0.75,),
    "blocks": ([["IN04", 0.5], ["MID", 0.0]],),
    "keyframes": ([[0.0, 0.25], [0.5, 0.5]],),
    "only": (["negative"],),
}
CONTROL: Mapping[str, tuple[Any, ...]] = {
    "name": ("canny", f"org/c{COMMIT}"),
    "sha256": ("aa",),
    "image_sha256": ("bb", "11"),
    "image_file": ("edges.png",),
    "strength": (1.0, 0.5),
    "start": (0.0, 0.25),
    "end": (1.0, 0.5),
    "mode": (None, 0, 7),
}
CONTROL_LATER: Mapping[str, tuple[Any, ...]] = {"said": ({"zeros": False},), "mask_sha256": ("22", "cc")}
PROMPT: dict[str, tuple[Any, ...]] = {
    "name": ("plus", f"org/i/i.bin{COMMIT}"),
    "sha256": ("88",),
    "encoder": ("clip", f"org/e/e.bin{COMMIT}", ""),
    "encoder_sha256": ("99", ""),
    "strength": (0.7, 1.0),
    "start": (0.0, 0.1),
    "end": (1.0, 0.5),
    "image_sha256": (["aa"],),
    "image_files": (["cat.png"],),
    "faces_sha256": ("", "f0"),
    "faces_file": ("face.npy",),
    "blocks": ([], [["down.2", 0.5]]),
}
#: set together
PROMPT_MASKS: Mapping[str, tuple[Any, ...]] = {"mask_sha256": (["m1"],), "mask_files": (["mask.png"],)}
REGIONS: tuple[Any, ...] = (
    {"prompt": "a dog", "strength": 9.0, "box": [0, 8, 32, 64], "mask_sha256": ""},
    {"prompt": "a cat", "strength": 1.0, "box": None, "mask_sha256": "mm"},
)
HIRES: tuple[Any, ...] = (
    {"scale": 2.0, "strength": 0.5, "steps": None, "via": "latent"},
    {"scale": 1.5, "strength": 0.4, "steps": 8, "via": "pixels", "upscaler": "double", "upscaler_sha256": "ef"},
)
#: all fields of the images of a recipe, which were always written, and the values that stand for unused ones
IMAGES: Mapping[str, tuple[Any, ...]] = {
    "image_sha256": ("", "11"),
    "image_file": ("", "photo.png"),
    "mask_sha256": ("", "22"),
    "mask_file": ("", "hole.png"),
    "first_step": (0, 2),
    "paste": (False, True),
    "hires": ({}, *HIRES),
    "regions": ([], [REGIONS[0]], [*REGIONS]),
    "reference_sha256": ("", "33"),
    "reference_file": ("", "chair.png"),
    "more_references": ([], ["44"]),
    "more_reference_files": ([], ["table.png"]),
    "reference_as": ("", "numbered"),
    "last_image_sha256": ("", "55"),
    "last_image_file": ("", "end.png"),
    "video_sha256": ("", "66"),
    "video_file": ("", "kite.mp4"),
    "video_mask_sha256": ("", "77"),
    "video_mask_file": ("", "moving.mp4"),
    "face_video_sha256": ("", "78"),
    "face_video_file": ("", "face.mp4"),
    "image_cfg": (0.0, 1.5),
    "noise_level": (0, 20),
}


def random_recipe(rng: random.Random) -> dict[str, Any]:
    """Return the JSON of a recipe of an earlier version."""
    share = rng.choice((0.05, 0.2, 0.6))
    found = _chosen(rng, FIRST) | _some(rng, LATER, share)
    required = {"name": "light", "sha256": "cd", "strength": 0.5}
    found["loras"] = [required | _some(rng, LORA, share) for _ in range(rng.choice((0, 1, 2)))]
    for lora in found["loras"]:
        if "keyframes" in lora and rng.random() < 0.5:
            lora["interpolation"] = "ease_in"
    if rng.random() < 0.2:
        found |= {"sigmas": [14.6, 4.1, 1.2, 0.3][: found["steps"]], "steps": 4, "schedule": "sigmas"}
    found["versions"] = rng.choice(({}, {"torch": "2.13", "modelpool": "0.1"}))
    found["warnings"] = rng.choice(([], ["negative: ignored"]))
    if rng.random() < 0.6:
        found["pictures"] = _random_images(rng)
    return found


def _random_images(rng: random.Random) -> dict[str, Any]:
    share = rng.choice((0.1, 0.5, 1.0))
    images = {name: rng.choice(values) if rng.random() < share else values[0] for name, values in IMAGES.items()}
    if rng.random() < 0.7:  # inputs that are used have files, most of the time
        for name in (name for name in IMAGES if name.endswith("_file")):
            images[name] = IMAGES[name][1] if images[name.removesuffix("_file") + "_sha256"] else ""
        images["more_reference_files"] = ["table.png"] if images["more_references"] else []
    counts = rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 1, 2))
    images["controls"] = [_chosen(rng, CONTROL) | _some(rng, CONTROL_LATER, 0.3) for _ in range(counts[0])]
    if counts[1]:
        images["image_prompts"] = [
            _chosen(rng, PROMPT) | _chosen(rng, rng.choice((PROMPT_MASKS, {}))) for _ in range(counts[1])
        ]
    return images


def _chosen(rng: random.Random, values: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: rng.choice(each) for name, each in values.items()}


def _some(rng: random.Random, values: Mapping[str, tuple[Any, ...]], share: float) -> dict[str, Any]:
    return {name: rng.choice(each) for name, each in values.items() if rng.random() < share}


def found_input(file: str) -> Any:
    """Stand in for the path of an input file, whose header would be read."""
    if file.endswith(".mp4"):
        return InputVideo(sha(file), 64, 64, 5, file)
    return InputFaces(sha(file), 1, 512, file) if file.endswith(".npy") else InputImage(sha(file), 64, 64, file)


def of_recipe(fields: Mapping[str, Any]) -> list[Any]:
    """Return everything that follows from the JSON of a recipe: digest, JSON text, lines and requests."""
    try:
        recipe = recipe_from_json(fields)
    except UserError as error:
        return [str(error)]
    plain = recipe_from_json({**fields, "seed": 0, "loras": []})
    try:
        requests: list[str] = [repr(each) for each in requests_of(recipe, found_input)]
    except UserError as error:
        requests = [str(error)]
    same = recipe_from_json(json.loads(recipe.to_json())) == recipe
    lines = recipe_facts(recipe)
    return [recipe.digest, recipe.to_json(), same, lines, requests, differing_fields(recipe, plain)]


#: families of all kinds; their facts
_FAMILIES = (
    *("ace_step_15", "cogvideox_fun_control", "cosxl_edit", "flux2", "flux_dev", "flux_fill", "glm_image"),
    *("ideogram4", "lotus_d", "ltxv", "omnigen", "qwen_image", "qwen_image_layered", "sd1", "sd1_ip2p", "sd2_inpaint"),
    *("sd21_unclip_l", "sd_x4", "sd3", "sdxl", "stable_audio_1", "sv3d_p", "svd", "wan21_flf2v", "wan22_animate"),
    *("wan22_i2v", "wan_vace", "zero123", "cascade_c", "cascade_b", "hunyuan_image_21_refiner"),
)
FACTS: dict[str, SamplingFacts] = {
    name: family.sampling for name, family in sorted(running_families().items()) if name in _FAMILIES
}
FACTS |= {  # the text encoder of the file tells that it reads images
    "qwen-edit": replace(FACTS["qwen_image"], reads=frozenset({"reference"}), reference_mode=ReferenceMode.BY_NAME)
}


class AllFamilies(FakeCatalog):
    """A model of each family, without files."""

    class Prompts(FakeImagePrompts):
        def find(self, name: str, images: int, encoder: str = "") -> FoundImagePrompt:
            if name != "plus":
                return super().find(name, images, encoder)
            ref = ImagePromptRef(name, f"/{name}.bin", sha(name), 1.0)
            return FoundImagePrompt(ref, self.encoder, "penultimate")

        encoder = ModelRef("clip", "/clip.safetensors", sha("clip"))

        def use_with(self, model: ModelRef, prompt: ImagePromptRef) -> Any:
            key = image_prompt_key(prompt)
            return ComponentSpec(key, Role.IMAGE_PROMPT, 2 * MIB, 2 * MIB), ComponentUse(key, MIB)

    image_prompts = Prompts()

    def find_model(self, name: str) -> ModelRef:
        return super().find_model(name) if name in SAMPLING else ModelRef(name, f"/{name}.safetensors", sha(name))

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        facts = SAMPLING.get(model.name, FACTS.get(model.name, SamplingFacts()))
        return ModelDefaults(*((128, 128) if facts.is_prior_stage else (64, 96)), facts)

    def components(self, model: ModelRef) -> dict[Role, ComponentSpec]:
        roles = (Role.VISION_ENCODER, Role.DIFFUSION_MODEL_2)
        more = {role: ComponentSpec(component_key(model, role), role, MIB, MIB) for role in roles}
        return super().components(model) | more


_PHOTO, _OTHER, _MASK = (InputImage(sha(name), *size, name) for name, size in (
    ("a.png", (64, 64)), ("b.png", (96, 64)), ("m.png", (64, 64)),
))  # fmt: skip
_VIDEO = InputVideo(sha("v.mp4"), 64, 64, 9, "v.mp4")
#: values of the fields of a request
FIELDS: Mapping[str, tuple[Any, ...]] = {
    "negative": ("blue",),
    "loras": (["light:0.5"], ["thick:0.5:0.25@0-0.5", "odd"], ["light:1:high"], ["words:0.8"]),
    "steps": (4, 30),
    "cfg": (1, 3.5),
    "sampler": ("dpmpp_2m", "euler_a", "dpm_adaptive", "dpmpp_2m_karras"),
    "schedule": ("karras", "beta", "ays", "gits"),
    "sigmas": ([0.9, 0.5, 0.2],),
    "eta": (0.5, 0.0),
    "s_noise": (1.01,),
    "s_churn": (0.5,),
    "shift": (3.0, 5.0),
    "width": (64, 128),
    "height": (128,),
    "image": (_PHOTO, _OTHER),
    "mask": (_MASK,),
    "strength": (0.5,),
    "paste": (False,),
    "hires": ("2:0.5:10", {"scale": 2, "upscaler": "double"}, {"scale": 1.5, "via": "latent"}),
    "upscale": ("double", {"model": "double", "scale": 1.5, "tile": 256}),
    "controls": ([{"model": "canny", "image": _PHOTO}], [{"model": "inpaint", "strength": 0.5, "mask": _MASK}]),
    "image_prompts": ([{"model": "plus", "image": _PHOTO, "strength": 0.5}],),
    "regions": ([{"prompt": "a dog", "box": [0, 0, 32, 32]}, {"prompt": "x", "mask": _MASK}],),
    "frames": (1, 5, 9),
    "frame_rate": (12.0,),
    "motion": (100,),
    "image_noise": (0.1,),
    "elevation": (5.0,),
    "azimuth": (30.0,),
    "camera_distance": (0.5,),
    "image_elevation": (10.0,),
    "seconds": (1.5,),
    "lyrics": ("[verse]\nla",),
    "lyrics_language": ("de",),
    "bpm": (96,),
    "key_scale": ("C major",),
    "time_signature": ("4",),
    "format": ("webp", "mp4", "flac"),
    "quality": (80,),
    "clip_skip": (1,),
    "reference": (_PHOTO, [_PHOTO, _OTHER]),
    "reference_as": ("whole", "numbered"),
    "last_image": (_OTHER,),
    "video": (_VIDEO,),
    "video_mask": (InputVideo(sha("n.mp4"), 64, 64, 9, "n.mp4"),),
    "face_video": (_VIDEO,),
    "image_cfg": (1.5,),
    "noise_level": (30,),
    "decoder": ("large:5:1.5",),
    "low_noise": ("3:0.9", "2"),
    "options": ({"freeu": True}, {"pag": {"scale": 3}}, {"cfg_zero": True}, {"teacache": True}),
}
_PLAIN = (
    *("negative", "loras", "steps", "cfg", "sampler", "schedule", "eta", "s_noise", "s_churn", "clip_skip", "width"),
    "options",
)
_OF_IMAGES = ("image", "hires", "upscale", "controls", "regions", "image_prompts", "quality", "format")
_MUSIC = ("lyrics", "lyrics_language", "bpm", "key_scale", "time_signature")


def _suitable(rng: random.Random, facts: SamplingFacts) -> dict[str, Any]:
    """Return fields most of which a model of `facts` supports, those that it needs among them."""
    names: list[str] = list(_PLAIN)
    needed: list[str] = []
    if facts.noise.takes_shift:
        names.append("shift")
    if facts.video is not None:
        names += ["frames", "frame_rate", "upscale"]
        numbers = facts.video.numbers
        names += [] if numbers is None else ["motion", "image_noise", "elevation"]
        if facts.video.begins is not None:
            (needed if facts.video.begins.is_required else names).append("image")
        if facts.video.ends is not None:
            needed.append(rng.choice(("image", "last_image")))
    elif facts.audio is not None:
        names += ["seconds", *(_MUSIC if facts.reads_lyrics else ())]
    elif facts.image_concat is not None or facts.takes_view or facts.image_labels is not None:
        needed += ["image", *(("mask",) if facts.inpaints else ())]
        names += ["image_cfg", "noise_level", "upscale"]
        names += ["azimuth", "elevation", "camera_distance"] if facts.takes_view else []
    else:
        names += rng.sample(_OF_IMAGES, 2)
    if takes_control_video(facts):
        needed += ["video", *rng.choice(((), ("video_mask",), ("reference",), ("face_video", "reference")))]
    if facts.needs_reference or facts.takes_reference:
        needed += rng.choice((("reference",), ("reference", "reference_as")))
    if facts.is_prior_stage:
        names.append("decoder")
    if facts.low_noise is not None:
        names += ["low_noise", "loras"]
    needed += ["image"] if "last_image" in needed or "controls" in names else []
    chosen = [*needed, *(name for name in names if rng.random() < 0.3)]
    return {name: rng.choice(FIELDS[name]) for name in dict.fromkeys(chosen)}


def random_request(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a request, which its model may refuse."""
    model = rng.choice((*FACTS, *SAMPLING, *["shapes"] * 20))
    facts = SAMPLING.get(model, FACTS.get(model, SamplingFacts()))
    text = rng.choice(("p", "embedding:worn p")) if facts.reads_text else ""
    found = {"model": model, "prompt": text, "seed": rng.choice((1, 2**64 - 1)), **_suitable(rng, facts)}
    return found | _some(rng, FIELDS, rng.choice((0.0, 0.0, 0.02, 0.06)))


def of_request(fields: Mapping[str, Any]) -> list[Any]:
    """Return everything that follows from a request: recipe, ids of tasks and warnings, or the error."""
    try:
        recipe, graph = build_graph(GenerateRequest(**fields), JobId("job"), AllFamilies())
    except UserError as error:
        return [str(error)]
    except (AssertionError, KeyError) as error:  # what the fakes are not made for
        return [type(error).__name__]
    tasks = [(task.task_id, list(task.input_names), task.together) for task in graph.job.tasks]
    return [recipe.to_json(), recipe.digest, tasks, list(graph.warnings), recipe_facts(recipe)]


def results() -> Iterator[list[Any]]:
    """Yield what follows from each random recipe, then from each random request."""
    rng = random.Random(34)
    for _ in range(RECIPES):
        yield of_recipe(random_recipe(rng))
    for _ in range(REQUESTS):
        yield of_request(random_request(rng))


def digest(value: Any) -> str:
    """Return a short digest of JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps([digest(each) for each in results()], indent=0) + "\n", encoding="utf-8")
