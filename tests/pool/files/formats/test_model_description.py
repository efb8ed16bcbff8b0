"""Descriptions of models in separate files: what they say is read strictly, and their files stay in their folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.files.formats.model_description import ENDING, description_of, is_description, read_description
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile, UserError

WHOLE = {
    "format": 1,
    "diffusion_model": "unet/paint.safetensors",
    "vae": "vae/soft.safetensors",
    "text_encoders": ["clip/l.safetensors", "clip/g.safetensors"],
}


def written(folder: Path, said: Any, name: str = "paint.model.json") -> Path:
    path = folder / name
    path.write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    found = read_description(path)
    assert found == Assembly(
        str(path),
        diffusion_model=str(tmp_path / "unet" / "paint.safetensors"),
        vae=str(tmp_path / "vae" / "soft.safetensors"),
        text_encoders=(str(tmp_path / "clip" / "l.safetensors"), str(tmp_path / "clip" / "g.safetensors")),
    )
    assert description_of(found, tmp_path) == WHOLE
    assert len(found.files) == 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("[]", "is a JSON list, expected an object"),
        ("{", "is damaged"),
        ({**WHOLE, "format": 2}, "format is 2, expected 1"),
        ({**WHOLE, "format": True}, "format is True, expected 1"),
        ({k: v for k, v in WHOLE.items() if k != "format"}, "format is None, expected 1"),
        (
            {**WHOLE, "lora": "x"},
            "has a key 'lora', expected only format, checkpoint, diffusion_model, low_noise, unconditional, ",
        ),
        ({"format": 1, "vae": "v.safetensors"}, "names no diffusion_model, expected one, or a checkpoint"),
        ({**WHOLE, "vae": 3}, "vae is 3, expected the path of a file"),
        ({**WHOLE, "vae": ""}, "vae is '', expected the path of a file"),
        ({**WHOLE, "vae": "a\0b"}, "expected the path of a file"),
        ({**WHOLE, "text_encoders": "clip.safetensors"}, "text_encoders is 'clip.safetensors', expected a list"),
        ({**WHOLE, "text_encoders": ["x"] * 9}, "names 9 text encoders, expected at most 8"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, said: Any, message: str) -> None:
    with pytest.raises(CorruptFile, match=message):
        read_description(written(tmp_path, said))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/../../x.safetensors", "/etc/passwd", "C:\\x.safetensors", "..\\x", "\\\\host\\x"]
)
def test_no_path_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeFile, match="expected a path below the folder of the description"):
        read_description(written(tmp_path, {**WHOLE, "vae": name}))


def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "models" / "inside").symlink_to(tmp_path / "models" / "elsewhere")
    said = {"format": 1, "diffusion_model": "link"}
    with pytest.raises(UnsafeFile, match="a link that leads to"):
        read_description(written(tmp_path / "models", said))
    read_description(written(tmp_path / "models", {**said, "diffusion_model": "inside"}))
    with pytest.raises(UnsafeFile, match="is not in"):
        description_of(Assembly("x", diffusion_model=str(tmp_path / "secret")), tmp_path / "models")


def test_thousands_of_damaged_descriptions_are_refused_or_harmless(tmp_path: Path) -> None:
    """Bytes changed, cut and put in: a typed error, or a description whose files lie in the folder."""
    dice, whole = random.Random(11), json.dumps(WHOLE).encode()
    path = tmp_path / f"x{ENDING}"
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            place = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[place] = dice.randrange(256)
                case 1:
                    del data[place : place + dice.randint(1, 9)]
                case _:
                    data[place:place] = dice.choice([b"../", b"/", b"\0", b"[", b"\xff", b'"', b"\\u0000"])
            if not data:
                break
        path.write_bytes(data)
        try:
            found = read_description(path)
        except UserError:
            continue
        assert all(Path(file).is_relative_to(tmp_path) and ".." not in Path(file).parts for file in found.files)


def test_names_of_descriptions() -> None:
    assert is_description("a/b.model.json")
    assert is_description("B.MODEL.JSON")
    assert not is_description("a/.model.json")
    assert not is_description("model.json")
    assert not is_description("model.safetensors.index.json")
