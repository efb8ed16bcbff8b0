"""Images that callers send: base64, or URLs of permitted hosts. Never paths: those would name files of the server."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from modelpool.actors.outputs.atomic_write import make_private_folder, write_atomically
from modelpool.actors.request.bounds import over_bound
from modelpool.actors.request.image_decoding import UprightImage, image_of_bytes, plain_pixels, upright_image
from modelpool.actors.request.image_fields import pixels_digest
from modelpool.actors.request.workflow_fields import MAX_NODE_ID, MAX_NODES
from modelpool.pool.values.core.errors import UserError, counted, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

#: fields of a request with an image as value
IMAGE_FIELDS = ("image", "mask", "last_image")
#: fields with an image or a list of images as value
LIST_FIELDS = ("reference", "video", "video_mask", "face_video")
#: fields with a list of tables as value, with the keys of these that are images
PART_FIELDS: Mapping[str, tuple[str, ...]] = {
    "controls": ("image", "mask"),
    "image_prompts": ("image", "mask"),
    "regions": ("mask",),
}
#: most pixels of all images of one call, unless a server sets less. A file of some KB may have millions of pixels, of
#: three bytes each
MAX_CALL_PIXELS = 64 * 2048 * 2048
FETCH_SECONDS = 20.0
MAX_URL_CHARACTERS = 2048
_EXPECTED = "an image file as base64, or as a data URL (paths of the server are not read)"
#: characters of a text that is no image in a message
_MOST_SHOWN = 40
_DATA_URL = re.compile(r"data:[\w.+/-]*;base64,")


class CallerImages:
    """Decodes the images of one call. Blocks while it fetches one: call it in a thread."""

    def __init__(
        self,
        url_hosts: Sequence[str],
        max_bytes: int,
        max_pixels: int = MAX_CALL_PIXELS,
        take: Callable[[int], None] | None = None,
    ) -> None:
        """`url_hosts` are those from which images are fetched, of up to `max_bytes`; all images together may have
        `max_pixels`. `take` gets the pixels of each image before it is decoded, and may refuse them.
        """
        self._url_hosts = frozenset(url_hosts)
        self._max_bytes = max_bytes
        self._take = take
        self._max_pixels = self._left_pixels = max_pixels

    def decode(self, name: str, value: Any) -> UprightImage:
        """Return the image in the field `name`. Raises UserError."""
        return upright_image(name, self.opened(name, value))

    def of_bytes(self, name: str, content: bytes) -> UprightImage:
        """Return the image in the content of a file. Raises UserError, also for too many pixels in one call."""
        return upright_image(name, self._opened_bytes(name, content))

    def opened(self, name: str, value: Any) -> Image:
        """Return the image in the field `name` as its file has it, of which the header is read. Raises UserError."""
        if not isinstance(value, str) or not value:
            raise unusable_field(name, type(value).__name__ if not isinstance(value, str) else value, _EXPECTED)
        if value.startswith(("http://", "https://")):
            return self._opened_bytes(name, self._fetch(name, value))
        text = value[match.end() :] if (match := _DATA_URL.match(value)) else value
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            found = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
            raise unusable_field(name, found, _EXPECTED) from None
        return self._opened_bytes(name, content)

    def _opened_bytes(self, name: str, content: bytes) -> Image:
        image = image_of_bytes(name, content)
        self._left_pixels -= image.width * image.height
        if self._left_pixels < 0:
            expected = f"up to {self._max_pixels} pixels in all images of one call"
            raise over_bound(name, f"an image of {image.width}x{image.height} pixels after others", expected)
        if self._take is not None:
            self._take(image.width * image.height)
        return image

    def in_fields(self, fields: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
        """Return the fields of a request with all their images decoded; as paths of files in `folder`, if that is
        given, for requests that outlive this process. Raises UserError.
        """
        found = dict(fields)
        options = found.get("options")
        if isinstance(options, Mapping):  # fields that only some models support may be here
            found["options"] = self.in_fields(options, folder)

        def image_in(name: str, value: Any) -> Any:
            decoded = self.decode(name, value)
            image = decoded.as_mask() if name.endswith("mask") else decoded.on_white()
            return image if folder is None else _saved(name, image, folder)

        for name in IMAGE_FIELDS:
            if found.get(name) is not None:
                found[name] = image_in(name, found[name])
        if found.get("workflow") is not None:
            found["workflow"] = self._in_workflow(found["workflow"], folder)
        for name in LIST_FIELDS:
            value = found.get(name)
            if isinstance(value, (list, tuple)):
                found[name] = [image_in(name, each) for each in value]
            elif value is not None:
                found[name] = [image_in(name, value)] if name in ("video", "face_video") else image_in(name, value)
        for name, keys in PART_FIELDS.items():
            if isinstance(found.get(name), (list, tuple)):
                found[name] = [_in_part(name, part, keys, image_in) for part in found[name]]
            elif isinstance(found.get(name), str):
                found[name] = [_in_part(name, found[name], keys, image_in)]
        return found

    def _in_workflow(self, workflow: Any, folder: Path | None) -> Any:
        """Return a workflow with the images of its nodes decoded. Raises UserError."""
        nodes = workflow.get("nodes") if isinstance(workflow, Mapping) else None
        if not isinstance(nodes, Mapping):
            return workflow  # which is refused as it is
        if len(nodes) > MAX_NODES:
            raise over_bound("workflow.nodes", counted(len(nodes), "node"), f"up to {MAX_NODES}")
        decoded: dict[str, Any] = {}
        for node_id, node in nodes.items():
            if not isinstance(node, Mapping):
                decoded[node_id] = node
                continue
            if "audio" in node:  # a caller names no files
                expected = "none: audio is uploaded, and read by a workflow in the format of ComfyUI"
                raise unusable_field(f"node {str(node_id)[:MAX_NODE_ID]}: audio", "a file or samples", expected)
            decoded[node_id] = self.in_fields(node, folder)
            if isinstance(node.get("request"), Mapping):
                decoded[node_id]["request"] = self.in_fields(node["request"], folder)
        return {**workflow, "nodes": decoded}

    def _fetch(self, name: str, url: str) -> bytes:
        check_url(name, url, self._url_hosts)
        import httpx2

        try:
            with (
                httpx2.Client(timeout=FETCH_SECONDS, follow_redirects=False, trust_env=False) as client,
                client.stream("GET", url) as answer,
            ):
                if answer.status_code != 200:
                    raise UserError(f"{name}: {url} answered {answer.status_code}, expected 200")
                content = bytearray()
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > self._max_bytes:
                        raise UserError(f"{name}: {url} has more than {self._max_bytes} bytes")
                return bytes(content)
        except (httpx2.HTTPError, httpx2.InvalidURL) as problem:
            raise UserError(f"{name}: {url} cannot be fetched ({problem})") from None


def check_url(name: str, url: Any, hosts: Sequence[str] | frozenset[str]) -> str:
    """Return a URL of one of `hosts`. Raises UnusableField: nothing else is contacted for a caller."""
    expected = f"a URL of {', '.join(sorted(hosts))}" if hosts else "no URL: [serve] url_hosts permits none"
    if not isinstance(url, str):
        raise unusable_field(name, url, expected)
    # urlsplit leaves out line breaks and tabs, which would be sent or refused later
    if len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise unusable_field(name, url, f"a URL of up to {MAX_URL_CHARACTERS} printable ASCII characters")
    try:
        parts = urlsplit(url)
        place = parts.netloc.lower()
    except ValueError:
        raise unusable_field(name, url, expected) from None
    if parts.scheme not in ("http", "https") or place not in hosts:
        raise unusable_field(name, url, expected)
    return url


def _in_part(name: str, part: Any, keys: Sequence[str], image_in: Callable[[str, Any], Any]) -> Any:
    """Return a part of a request, such as a ControlNet, with its images decoded."""
    if isinstance(part, str) and name in ("controls", "image_prompts") and "=" in part:
        expected = '{"model":, "image":, "strength":, ...} with the image as base64, or a text without a file'
        raise unusable_field(name, part, expected)
    if not isinstance(part, Mapping):
        return part
    if isinstance(part.get("faces"), (str, bytes)):  # a caller names no files
        raise unusable_field(f"{name}.faces", part["faces"], "a list of numbers for each face")
    decoded: dict[str, Any] = {}
    for key in keys:
        value = part.get(key)
        if isinstance(value, (list, tuple)):
            decoded[key] = [image_in(f"{name}.{key}", each) for each in value]
        elif value is not None:
            decoded[key] = image_in(f"{name}.{key}", value)
    return {**part, **decoded}


def _saved(name: str, image: Image, folder: Path) -> str:
    """Write an image to `folder` under the hash of its pixels, unless it is there; return the path."""
    is_mask = name.endswith("mask")
    pixels = plain_pixels(name, image, is_mask)
    path = folder / f"{pixels_digest(pixels)}.png"
    if not path.exists():
        import PIL.Image

        content = BytesIO()
        PIL.Image.fromarray(pixels).save(content, "PNG")
        make_private_folder(folder)
        try:
            write_atomically(path, content.getvalue())
        except FileNotFoundError:  # another call has just written the same image
            if not path.exists():
                raise
    return str(path)
