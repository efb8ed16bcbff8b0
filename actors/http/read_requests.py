"""Requests that metadata of images describes: the values that its readers return, and how a pool's names complete them.

`modelpool.request_like` and `modelpool generate --like` read recipes of modelpool, `parameters` of the A1111 web UI and
its relatives, and workflows of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from modelpool.actors.http.service.read_fields import ReadFields
from modelpool.actors.outputs.image_metadata import PARAMETERS_KEY, RECIPE_KEY, is_image, texts_of_image
from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError, counted, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelpool.actors.request.audio_fields import AudioFile
    from modelpool.actors.request.control_video_fields import VideoFile

#: (name of a model) -> title of its family
FamilyOf: TypeAlias = Callable[[str], str]
#: text of a PNG in which ComfyUI writes the workflow that made it, in the API format
PROMPT_KEY = "prompt"
#: folder next to a workflow that is searched for its images, too
INPUT_FOLDER = "input"
#: files of metadata are text; an image is not read as text
_MAX_TEXT_BYTES = 16 << 20
_FORMS = "an image with metadata of modelpool, A1111 or ComfyUI, a .txt with parameters, or a .json workflow"


def read_fields(path: str | Path, family_of: FamilyOf = lambda model: "") -> ReadFields:
    """Return the fields of the request that the metadata at `path` describes: an image, a .txt with A1111 parameters,
    or a .json with a workflow of ComfyUI in either format. `family_of` returns the title of the family of a model, by
    its name; "" if it is unknown.

    Of several texts in an image, modelpool's counts first, then A1111's. Raises UserError.
    """
    place = Path(path)
    try:
        with place.open("rb") as opened:
            start = opened.read(16)
            if is_image(start):
                return fields_of_texts(texts_of_image(place), place, family_of)
            if len(content := start + opened.read(_MAX_TEXT_BYTES)) > _MAX_TEXT_BYTES:
                raise unusable_field(str(place), "a large file", _FORMS)
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror})") from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise unusable_field(str(place), "bytes", _FORMS) from None
    key = PROMPT_KEY if text.lstrip().startswith("{") else PARAMETERS_KEY
    return fields_of_texts({key: text}, place, family_of)


def fields_of_texts(
    texts: Mapping[str, str], place: Path = Path(), family_of: FamilyOf = lambda model: ""
) -> ReadFields:
    """Return the fields of the request that the texts of an image describe. Images that it names are searched next to
    `place`. Raises UserError."""
    if RECIPE_KEY in texts:
        return _of_recipe(texts[RECIPE_KEY], place)
    if PARAMETERS_KEY in texts:
        from modelpool.actors.http.a1111.a1111_parameters import fields_of_parameters
        from modelpool.actors.outputs.image_file import parse_parameters

        parsed = parse_parameters(texts[PARAMETERS_KEY])
        values = parsed.values
        return fields_of_parameters(parsed, family_of(values.get("Model") or values.get("Model hash", "")))
    if PROMPT_KEY in texts:
        return _of_workflow(texts[PROMPT_KEY], place, family_of)
    found = f"only the texts {', '.join(sorted(texts))}" if texts else "no metadata"
    raise UserError(f"{place}: found {found}, expected {_FORMS}")


def _of_recipe(text: str, place: Path) -> ReadFields:
    from modelpool.actors.graph.features.feature import InputMissing
    from modelpool.actors.graph.recipe_request import requests_of
    from modelpool.actors.outputs.recipe_json import recipe_from_text

    recipe = recipe_from_text(text)

    def find(name: str) -> str:
        found = place.parent / Path(name).name
        if not found.is_file():
            raise InputMissing(f"the input {name} is not in {place.parent}")
        return str(found)

    likeliest = requests_of(recipe, find)[0]
    fields = {name: getattr(likeliest, name) for name in likeliest.model_fields_set if name != "model"}
    return ReadFields(fields, recipe.model, recipe.model_sha256, {each.name: each.sha256 for each in recipe.loras})


def _of_workflow(text: str, place: Path, family_of: FamilyOf) -> ReadFields:
    from modelpool.actors.http.comfy.comfy_export import api_format
    from modelpool.actors.http.comfy.comfy_graph import PoolNames
    from modelpool.actors.http.comfy.comfy_node_types import LORAS, MODELS, file_stem
    from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
    from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of

    try:
        graph = api_format(parse_json(text.encode("utf-8", "surrogatepass")))
    except NotJson as problem:
        raise UserError(f"{place}: {problem}") from None
    named: dict[Any, list[str]] = {MODELS: [], LORAS: []}
    for node in graph.values():
        kind = NODE_TYPES.get(node.get("class_type", "")) if isinstance(node, dict) else None
        for given in () if kind is None else kind.inputs:
            value = (node.get("inputs") or {}).get(given.name)
            if given.choices in named and isinstance(value, str):
                named[given.choices].append(file_stem(value))
    families = {name: family_of(name) for name in named[MODELS]}
    names = PoolNames(
        families,
        named[LORAS],
        video_facts=lambda name: video_next_to(place, name),
        audio_facts=lambda name: audio_next_to(place, name),
    )
    outputs = outputs_of(graph, names)
    found = requests_of(outputs[0], names, lambda name: image_next_to(place, name))[0]
    if found.strength == 0:
        raise unusable_field("denoise", 0, f"a number above 0; `modelpool run {place}` decodes the start as it is")
    fields = {name: getattr(found, name) for name in found.model_fields_set if name != "model"}
    more = len(outputs) - 1
    notes = (f"the workflow has {counted(more, 'more output')}: not used",) if more else ()
    return ReadFields(fields, found.model, notes=(*outputs[0].warnings, *notes))


def image_next_to(place: Path, name: str) -> Image:
    """Return the image that the workflow at `place` names: in its folder, or in `input` there, as in ComfyUI. Raises
    UserError, also for a name of a file elsewhere."""
    from modelpool.actors.request.image_decoding import image_of_bytes

    plain = Path(name.removesuffix(" [input]"))
    if plain.is_absolute() or ".." in plain.parts:  # the file comes from anybody: it names no file elsewhere
        raise unusable_field("image", name, f"a file next to {place}")
    for path in (place.parent / plain, place.parent / INPUT_FOLDER / plain):
        if path.is_file():
            return image_of_bytes(name, path.read_bytes())
    raise unusable_field("image", name, f"a file next to {place}, or in {INPUT_FOLDER} there")


def video_next_to(place: Path, name: str) -> VideoFile:
    """Return the facts of the video that the workflow at `place` names, as `image_next_to`. Raises UserError."""
    from modelpool.actors.request.control_video_fields import video_facts

    return video_facts("video", _file_next_to("video", place, name))


def audio_next_to(place: Path, name: str) -> AudioFile:
    """Return the facts of the audio that the workflow at `place` names, as `image_next_to`. Raises UserError."""
    from modelpool.actors.request.audio_fields import audio_facts

    return audio_facts("audio", _file_next_to("audio", place, name))


def _file_next_to(field: str, place: Path, name: str) -> str:
    plain = Path(name.removesuffix(" [input]"))
    if plain.is_absolute() or ".." in plain.parts:
        raise unusable_field(field, name, f"a file next to {place}")
    for path in (place.parent / plain, place.parent / INPUT_FOLDER / plain):
        if path.is_file():
            return str(path)
    raise unusable_field(field, name, f"a file next to {place}, or in {INPUT_FOLDER} there")


def request_like(path: str | Path, **changes: Any) -> GenerateRequest:
    """Return the request that the metadata of an image describes: of modelpool, of the A1111 web UI and its relatives,
    or of ComfyUI; or the request of a .txt with parameters, or of a .json workflow. `changes` set or replace fields.

    Warns of what has no meaning here (UserWarning). Raises UserError.
    """
    import warnings

    read = read_fields(path)
    for note in read.notes:
        warnings.warn(f"{path}: {note}", UserWarning, stacklevel=2)
    return read.request(**changes)
