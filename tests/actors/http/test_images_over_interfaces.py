"""Every interface makes the same of an image: upright, 8 bits per channel, and its transparency by one rule."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.http.application import application
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.comfy.test_comfy_api import GRAPH
from tests.actors.http.random_images import RandomImage, exif_of, png, random_images

#: levels by which two correct ways to compose and to weigh differ, beyond the tolerance of a file
_ROUNDING = 1.01
_FIELDS = {"model": "shapes", "prompt": "a red circle"}


class RecordingPool(RefusingPool):
    """Keeps the requests that reach it."""

    def __init__(self) -> None:
        self.found: list[GenerateRequest] = []
        #: of the first request of a detached submission; its file is removed with the refusal
        self.stored: Any = None

    def submit(self, requests: Iterable[GenerateRequest], **options: Any) -> Any:
        self.found = list(requests)
        return super().submit(self.found, **options)

    def submit_detached(self, requests: Iterable[GenerateRequest], **options: Any) -> Any:
        found = list(requests)
        self.stored = np.array(Image.open(found[0].image))
        return self.submit(found)

    def recipes(self, requests: Iterable[GenerateRequest]) -> Any:
        """Accept all of them: as of a model that reads references."""
        return tuple(None for _ in requests)


class Interfaces:
    """The ways for an image to reach a pool: each returns the pixels that would, or raises the refusal."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pool = folder, RecordingPool()
        self._app = application(self._pool, ServeSection(), folder / "outputs")

    def path(self, image: RandomImage) -> Any:
        path = self._folder / "image.file"
        path.write_bytes(image.content)
        kept: list[Any] = []
        InputImages(kept.append).bring(GenerateRequest(**_FIELDS, reference=path))
        return kept[0].pixels_HWC

    def pillow(self, image: RandomImage) -> Any:
        return GenerateRequest(**_FIELDS, image=_opened(image.content)).image.pixels

    def pillow_mask(self, image: RandomImage) -> Any:
        return GenerateRequest(**_FIELDS, image=_opened(_plain(image)), mask=_opened(image.content)).mask.pixels

    def video(self, image: RandomImage) -> Any:
        return GenerateRequest(**_FIELDS, video=[_opened(image.content)]).video.frames[0]

    def native(self, image: RandomImage) -> Any:
        return self._native(image=_text(image.content)).image.pixels

    def native_data_url(self, image: RandomImage) -> Any:
        return self._native(image=f"data:image/any;base64,{_text(image.content)}").image.pixels

    def native_journal(self, image: RandomImage) -> Any:
        request = self._posted(
            "/api/jobs", {"requests": [{**_FIELDS, "image": _text(image.content)}], "detached": True}
        )
        assert isinstance(request.image, str)
        return self._pool.stored

    def native_control(self, image: RandomImage) -> Any:
        return self._native(controls=[{"model": "canny", "image": _text(image.content)}]).controls[0].image.pixels

    def native_image_prompt(self, image: RandomImage) -> Any:
        prompt = {"model": "plus", "image": _text(image.content)}
        return self._native(image_prompts=[prompt]).image_prompts[0].image.pixels

    def native_mask(self, image: RandomImage) -> Any:
        return self._native(image=_text(_plain(image)), mask=_text(image.content)).mask.pixels

    def native_region(self, image: RandomImage) -> Any:
        return self._native(regions=[{"prompt": "x", "mask": _text(image.content)}]).regions[0].mask.pixels

    def openai(self, image: RandomImage) -> Any:
        return self._edited(image=image.content).reference.pixels

    def openai_with_mask(self, image: RandomImage) -> Any:
        return self._edited(image=image.content, mask=_clear(image)).image.pixels

    def openai_mask(self, image: RandomImage) -> Any:
        return self._edited(image=_plain(image), mask=image.content).mask.pixels

    def a1111(self, image: RandomImage) -> Any:
        return self._img2img(image).image.pixels

    def a1111_fitted(self, image: RandomImage) -> Any:
        return self._img2img(image, resize_mode=1).image.pixels

    def a1111_with_mask(self, image: RandomImage) -> Any:
        return self._img2img(image, mask=_text(_plain(image))).image.pixels

    def a1111_doubled(self, image: RandomImage) -> Any:
        width, height = image.size
        return self._img2img(image, width=2 * width, height=2 * height).image.pixels

    def a1111_mask(self, image: RandomImage) -> Any:
        fields = {"init_images": [_text(_plain(image))], "mask": _text(image.content), "mask_blur": 0}
        return self._img2img(image, **fields).mask.pixels

    def a1111_control(self, image: RandomImage) -> Any:
        units = [{"model": "canny", "image": _text(image.content)}]
        body = {"prompt": "x", "alwayson_scripts": {"controlnet": {"args": units}}}
        return self._posted("/sdapi/v1/txt2img", body).controls[0].image.pixels

    def a1111_extras(self, image: RandomImage) -> Any:
        wanted = {"image": _text(image.content), "upscaling_resize": 1, "upscaler_1": "Nearest"}
        answer = self._sent("/sdapi/v1/extra-single-image", json.dumps(wanted).encode())
        _check(answer)
        made = _opened(base64.b64decode(answer.json["image"]))
        assert made.getexif().get(0x0112) is None, "a stale orientation"
        return np.array(made)

    def comfy(self, content: bytes, scale: int = 1) -> GenerateRequest:
        """Start from an image of LoadImage, scaled by a node, with its mask."""
        nodes = {
            "9": _node("LoadImage", image=self._uploaded(content)),
            "12": _node("ImageScaleBy", image=["9", 0], upscale_method="nearest-exact", scale_by=float(scale)),
            "10": _node("VAEEncode", pixels=["12", 0], vae=["1", 2]),
            "11": _node("SetLatentNoiseMask", samples=["10", 0], mask=["9", 1]),
        }
        return self._workflow(nodes)

    def comfy_edited(self, content: bytes, mask: bytes) -> bytes:
        """Return an uploaded image with the mask that the editor sends."""
        named = json.dumps({"filename": self._uploaded(content), "subfolder": "", "type": "input"})
        answer = self._sent("/upload/mask", *_form({"original_ref": named, "overwrite": "true"}, image=mask))
        _check(answer)
        return self._call("GET", "/view", query=f"filename={answer.json['name']}&type=input").body

    def comfy_red(self, image: RandomImage) -> Any:
        """The red channel as a mask."""
        nodes = {
            "9": _node("LoadImageMask", image=self._uploaded(image.content), channel="red"),
            "12": _node("LoadImage", image=self._uploaded(_plain(image), "plain")),
            "11": _node("VAEEncodeForInpaint", pixels=["12", 0], vae=["1", 2], mask=["9", 0], grow_mask_by=0),
        }
        return self._workflow(nodes).mask.pixels

    def _workflow(self, nodes: Mapping[str, Any]) -> GenerateRequest:
        graph = copy.deepcopy(GRAPH) | nodes
        graph["5"]["inputs"]["batch_size"] = 1
        graph["6"]["inputs"]["latent_image"] = ["11", 0]
        return self._posted("/prompt", {"prompt": graph})

    def _native(self, **fields: Any) -> GenerateRequest:
        return self._posted("/api/jobs", {**_FIELDS, **fields})

    def _img2img(self, image: RandomImage, **fields: Any) -> GenerateRequest:
        sides = {"width": image.size[0], "height": image.size[1]}
        return self._posted(
            "/sdapi/v1/img2img", {"prompt": "x", "init_images": [_text(image.content)], **sides, **fields}
        )

    def _edited(self, **files: bytes) -> GenerateRequest:
        return self._recorded(self._sent("/v1/images/edits", *_form(_FIELDS, **files)))

    def _uploaded(self, content: bytes, name: str = "image") -> str:
        answer = self._sent("/upload/image", *_form({"overwrite": "true"}, image=content, name=name))
        _check(answer)
        return str(answer.json["name"])

    def _posted(self, path: str, body: Mapping[str, Any]) -> GenerateRequest:
        return self._recorded(self._sent(path, json.dumps(body).encode()))

    def _recorded(self, answer: Answer) -> GenerateRequest:
        """Return the request that reached the pool. Raises the refusal if none did."""
        found, self._pool.found = self._pool.found, []
        if not found:
            raise UserError(answer.body.decode())
        return found[0]

    def _sent(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        return self._call("POST", path, body, headers)

    def _call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, query: str = ""
    ) -> Answer:
        return asyncio.run(call(self._app, method, path, body, headers, query))


_OVER_WHITE = (
    *(Interfaces.path, Interfaces.pillow, Interfaces.video),
    *(Interfaces.native, Interfaces.native_data_url, Interfaces.native_journal),
    *(Interfaces.native_control, Interfaces.native_image_prompt),
    *(Interfaces.openai, Interfaces.openai_with_mask),
    *(Interfaces.a1111, Interfaces.a1111_fitted, Interfaces.a1111_with_mask),
    *(Interfaces.a1111_control, Interfaces.a1111_extras),
)
_MASKS = (Interfaces.pillow_mask, Interfaces.native_mask, Interfaces.native_region, Interfaces.a1111_mask)


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


def _plain(image: RandomImage) -> bytes:
    """A white image of the shown size."""
    width, height = image.size
    return png(np.full((height, width, 3), 255), 8, exif_of(1))


def _clear(image: RandomImage) -> bytes:
    """A transparent image of the shown size."""
    width, height = image.size
    return png(np.zeros((height, width, 4)), 8, exif_of(1))


def _form(texts: Mapping[str, str], name: str = "image", **files: bytes) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a form."""
    parts = [f'name="{field}"\r\n\r\n'.encode() + text.encode() for field, text in texts.items()]
    parts += [f'name="{field}"; filename="{name}.png"\r\n\r\n'.encode() + file for field, file in files.items()]
    body = b"".join(b"--edge\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    return body + b"--edge--\r\n", {"content-type": "multipart/form-data; boundary=edge"}


def _check(answer: Answer) -> None:
    if answer.status != 200:
        raise UserError(answer.body.decode())


def _enlarged(image: RandomImage, scale: int) -> Any:
    return image.colours.repeat(scale, axis=0).repeat(scale, axis=1)


class Differences:
    """Collects what an interface makes of images beside the expected values."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def compare(self, way: str, image: RandomImage, read: Callable[[], Any], expected: Callable[[], Any]) -> None:
        """Compare pixels, or the refusal."""
        try:
            pixels = np.asarray(read()).astype(np.float64)
        except UserError as refusal:
            if not image.refused or image.refused not in str(refusal):
                self.found.append(f"{way}, {image.label}: refused: {refusal}")
            return
        if image.refused:
            self.found.append(f"{way}, {image.label}: accepted, expected a refusal that names {image.refused}")
            return
        wanted = expected()
        if pixels.shape != wanted.shape:
            self.found.append(f"{way}, {image.label}: found the shape {pixels.shape}, expected {wanted.shape}")
        elif (levels := np.abs(pixels - wanted).max()) > image.tolerance + _ROUNDING:
            self.found.append(f"{way}, {image.label}: differs by {levels:.1f} levels")


@pytest.fixture(scope="module")
def interfaces(tmp_path_factory: pytest.TempPathFactory) -> Interfaces:
    return Interfaces(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def images() -> list[RandomImage]:
    return list(random_images(32))


def test_images_are_upright_and_over_white(interfaces: Interfaces, images: list[RandomImage]) -> None:
    differences = Differences()
    for image in images:
        for way in _OVER_WHITE:
            differences.compare(way.__name__, image, partial(way, interfaces, image), partial(image.over, 255))
    assert "\n".join(differences.found) == ""


def test_masks_are_upright_and_over_black(interfaces: Interfaces, images: list[RandomImage]) -> None:
    differences = Differences()
    for image in images:
        for way in _MASKS:
            differences.compare(way.__name__, image, partial(way, interfaces, image), image.mask)
    assert "\n".join(differences.found) == ""


def test_a_resized_image_is_what_the_upright_image_over_white_is_resized_to(
    interfaces: Interfaces, images: list[RandomImage]
) -> None:
    def doubled(image: RandomImage) -> Any:
        shown = Image.fromarray(np.round(image.over(255)).astype(np.uint8))
        return np.asarray(shown.resize((2 * shown.width, 2 * shown.height))).astype(int)

    differences = Differences()
    for image in images:
        wider = replace(image, tolerance=2 * image.tolerance + 2)  # bicubic weights reach beyond 1
        differences.compare("A1111", wider, partial(interfaces.a1111_doubled, image), partial(doubled, image))
    assert "\n".join(differences.found) == ""


def _loaded(request: GenerateRequest) -> Any:
    """The image that a workflow loads."""
    assert request.workflow is not None
    (image,) = [node.image for node in request.workflow.nodes.values() if node.kind == "image"]
    return image


def test_comfyui_keeps_the_colours_and_takes_the_mask_from_alpha(
    interfaces: Interfaces, images: list[RandomImage]
) -> None:
    def colours(image: RandomImage, scale: int) -> Any:
        request = interfaces.comfy(image.content, scale)
        return (request.image or _loaded(request)).pixels

    def mask(image: RandomImage, scale: int) -> Any:
        """Without a transparent pixel it is black: the workflow has one then, which a request refuses."""
        request = interfaces.comfy(image.content, scale)
        return np.zeros(_loaded(request).pixels.shape[:2]) if request.mask is None else request.mask.pixels

    differences = Differences()
    for image in images:
        for scale in (1, 2):
            wanted = partial(_enlarged, image, scale)
            differences.compare(f"LoadImage x{scale}", image, partial(colours, image, scale), wanted)
        differences.compare("its mask", image, partial(mask, image, 1), image.clear)
        differences.compare("red channel", image, partial(interfaces.comfy_red, image), image.red)
    assert "\n".join(differences.found) == ""


def test_the_mask_of_a_loaded_image_follows_the_scaling_of_its_colours(interfaces: Interfaces) -> None:
    """A picture from the mask editor, scaled by a node: ComfyUI scales the mask, too, when it is used."""
    alpha = np.full((16, 24, 1), 255)
    alpha[4:12, 8:16] = 0
    content = png(np.dstack([np.full((16, 24, 3), (200, 30, 90)), alpha]), 8, exif_of(6))
    request = interfaces.comfy(content, scale=2)
    assert (request.image.pixels.shape, request.mask.pixels.shape) == ((48, 32, 3), (48, 32))
    assert request.image.pixels.reshape(-1, 3).tolist() == [[200, 30, 90]] * 48 * 32
    assert (request.mask.pixels[24, 16], request.mask.pixels[4, 4]) == (255, 0)


def test_masks_of_the_editor_fit_the_shown_image(interfaces: Interfaces, images: list[RandomImage]) -> None:
    """The editor of ComfyUI sends a mask of the size that it shows."""

    def edited(image: RandomImage, drawn: bytes) -> Any:
        stored = interfaces.comfy_edited(image.content, drawn)
        assert _opened(stored).getexif().get(0x0112) is None, "a stale orientation"
        request = interfaces.comfy(stored)
        return np.dstack([request.image.pixels, request.mask.pixels])

    def expected(image: RandomImage, alpha: Any) -> Any:
        return np.dstack([image.colours, 255 - alpha])

    differences = Differences()
    for image in images:
        width, height = image.size
        alpha = np.random.default_rng(1).integers(0, 256, (height, width))
        drawn = png(np.dstack([np.zeros((height, width, 3)), alpha]), 8, exif_of(1))
        differences.compare("editor", image, partial(edited, image, drawn), partial(expected, image, alpha))
    assert "\n".join(differences.found) == ""


def test_openai_masks_are_the_alpha_channel(interfaces: Interfaces, images: list[RandomImage]) -> None:
    differences = Differences()
    for image in images:
        wanted = image if image.alpha is not None or image.refused else replace(image, refused="alpha channel")
        differences.compare("mask", wanted, partial(interfaces.openai_mask, image), image.clear)
    assert "\n".join(differences.found) == ""


def test_a_server_makes_the_same_of_an_image_however_it_is_stored(server: str) -> None:
    """End to end: an upright picture and its turned, 16-bit and transparent forms give equal images."""

    def made(content: bytes) -> bytes:
        body = {"prompt": "a red circle", "init_images": [_text(content)], "width": 64, "height": 128, "steps": 4}
        body |= {"denoising_strength": 0.5, "seed": 1}
        answer = requests.post(f"{server}/sdapi/v1/img2img", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return np.asarray(_opened(base64.b64decode(answer.json()["images"][0]))).tobytes()

    shown = np.full((128, 64, 3), 255)
    shown[:40, 20:50] = 17
    hidden = np.dstack([np.where(shown == 255, 90, shown), np.where(shown[..., 0] == 255, 0, 255)])
    forms = {
        "turned": png(np.rot90(shown), 8, exif_of(6)),
        "16 bits": png(shown[..., :1] * 257, 16, exif_of(1)),
        "transparent": png(hidden, 8, exif_of(1)),
    }
    upright = made(png(shown, 8, exif_of(1)))
    assert [name for name, content in forms.items() if made(content) != upright] == []
