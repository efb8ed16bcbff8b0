"""The field `image_prompts`: its short form, refusals by name, and embeddings of faces in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.request.face_fields import Faces
from modelpool.actors.request.image_prompt_fields import ImagePrompt
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.image_prompt_blocks import block_factor


@pytest.fixture
def image(tmp_path: Path) -> str:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "seen.png")
    return str(tmp_path / "seen.png")


def test_the_short_form_of_the_command_line(image: str) -> None:
    request = GenerateRequest(model="m", prompt="", image_prompts=[f"plus={image}:0.7:0.1:0.8", f"plus={image}"])
    first, second = request.image_prompts
    assert (first.model, first.images, first.strength, first.start, first.end) == ("plus", (image,), 0.7, 0.1, 0.8)
    assert (second.strength, second.start, second.end) == (1.0, 0.0, 1.0)
    masked = GenerateRequest(model="m", prompt="", image_prompts=[f"plus={image}:0.7,mask={image}"]).image_prompts[0]
    assert (masked.images, masked.strength, masked.masks) == ((image,), 0.7, (image,))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, r"image_prompts.image: missing"),
        ({"image": "nowhere.png"}, r"image_prompts.image: found 'nowhere.png', expected an existing file"),
        ({"faces": [1.0], "strength": 11}, r"image_prompts.strength: found 11"),
        ({"faces": [1.0], "start": 0.5, "end": 0.5}, r"image_prompts.start, image_prompts.end: found '0.5 to 0.5'"),
        ({"faces": [1.0], "blocks": {"up.x": 1}}, r"image_prompts.blocks: found 'up.x'"),
        ({"faces": [1.0], "blocks": {"up.1": True}}, r"image_prompts.blocks.up.1: found True"),
        ({"faces": [1.0], "mask": "nowhere.png"}, r"image_prompts.mask: found 'nowhere.png', expected an existing"),
        (
            {"faces": [[1.0], [2.0]], "mask": [np.ones((8, 8), bool)] * 3},
            r"image_prompts.mask: found '3 masks', .* or 2",
        ),
        ({"faces": [1.0], "blocks": 5}, r"image_prompts.blocks: found 5, expected factors by names"),
        ({"faces": [1.0], "blocks": [1, 2]}, r"image_prompts.blocks: found \[1, 2\]"),
        ({"faces": [1.0], "blocks": [[1, 2], ["up.0", 1]]}, r"image_prompts.blocks: found 1"),
        ({"faces": [1.0], "blocks": "up.0"}, r"image_prompts.blocks: found 'up.0'"),
        ({"faces": []}, r"image_prompts.faces: found 'an array"),
        ({"faces": [float("nan")]}, r"image_prompts.faces: found 'NaN or infinity'"),
        ({"faces": "face.txt"}, r"image_prompts.faces: found 'face.txt', expected an existing file"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        ImagePrompt(model="plus", **fields)


def test_a_face_is_the_same_in_every_form(tmp_path: Path) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(1, 8)
    np.save(tmp_path / "face.npy", rows)
    save_file({"face": rows[0]}, tmp_path / "face.safetensors")
    (tmp_path / "face.json").write_text(json.dumps(rows.tolist()))
    forms = [rows, rows[0].tolist(), *(tmp_path / f"face.{kind}" for kind in ("npy", "safetensors", "json"))]
    found = [ImagePrompt(model="faceid", faces=form).faces for form in forms]
    assert all(isinstance(faces, Faces) for faces in found)
    assert len({faces.sha256 for faces in found}) == 1
    assert found[2].file == "face.npy"


def test_a_request_with_a_face_can_be_written_and_read_again() -> None:
    """As the journal of detached jobs does."""
    prompt = {"model": "faceid", "faces": [[1.0, 2.5]], "strength": 0.5, "blocks": {"up.1": 0.5}}
    request = GenerateRequest(model="m", prompt="", image_prompts=[prompt])
    again = GenerateRequest(**json.loads(json.dumps(request.model_dump(mode="json", exclude_unset=True))))
    assert again.image_prompts == request.image_prompts


def test_a_caller_over_http_names_no_file(image: str) -> None:
    for part, expected in (
        ({"model": "faceid", "faces": image}, r"image_prompts.faces: found .*, expected a list of numbers"),
        ({"model": "plus", "image": image}, r"image_prompts.image: .*base64"),
        ({"model": "plus", "image": [image]}, r"image_prompts.image: .*base64"),
        ({"model": "faceid", "faces": [1.0], "mask": image}, r"image_prompts.mask: .*base64"),
        (f"plus={image}", r"image_prompts: .*base64"),
    ):
        with pytest.raises(UserError, match=expected):
            CallerImages((), 1 << 20).in_fields({"image_prompts": [part]})


@pytest.mark.parametrize(
    ("module", "factor"),
    [
        ("up_blocks.0.attentions.1.transformer_blocks.0.attn2", 0.7),
        ("up_blocks.0.attentions.0.transformer_blocks.0.attn2", 0.5),
        ("mid_block.attentions.0.transformer_blocks.0.attn2", 0.2),
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn2", 0.0),
    ],
)
def test_the_factor_of_an_attention_is_its_own_or_its_blocks(module: str, factor: float) -> None:
    assert block_factor((("up.0", 0.5), ("up.0.1", 0.7), ("mid", 0.2)), module) == factor
    assert block_factor((), module) == 1.0
