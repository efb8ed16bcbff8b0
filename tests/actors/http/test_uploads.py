"""Uploaded images: names, owners, and the bound of the folder."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from modelpool.actors.http.uploads import Uploads
from modelpool.pool.core.errors import UserError


def png(colour: str) -> bytes:
    content = BytesIO()
    Image.new("RGB", (16, 16), colour).save(content, "PNG")
    return content.getvalue()


def test_another_image_of_the_same_name_gets_a_number(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    assert uploads.add("ann", "a.png", png("red")) == "a.png"
    assert uploads.add("ann", "a.png", png("red")) == "a.png"
    assert uploads.add("ann", "a.png", png("blue")) == "a (1).png"
    assert uploads.add("ann", "a.png", png("green"), overwrite=True) == "a.png"
    assert uploads.image("ann", "a.png [input]").getpixel((0, 0)) == (0, 128, 0)


def test_owners_see_their_own_images(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.add("ann", "a.png", png("red"), "mine")
    assert (uploads.names("ann"), uploads.names("bob")) == (("mine/a.png",), ())
    with pytest.raises(UserError, match="was not uploaded"):
        uploads.content("bob", "mine/a.png")


def test_the_oldest_images_are_removed(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, most_bytes=3 * len(png("red")))
    for age, name in enumerate(("a.png", "b.png", "c.png", "d.png")):
        uploads.add("ann", name, png("red"))
        (path,) = tmp_path.rglob(name)
        os.utime(path, (age, age))
    assert uploads.names("ann") == ("b.png", "c.png", "d.png")


@pytest.mark.parametrize("name", ["../a.png", "/a.png", ".a.png", "", "a\\b.png", "a\n.png", "a" * 300])
def test_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads")
    for names in ((name, ""), ("a.png", name or "..")):
        with pytest.raises(UserError):
            uploads.add("ann", names[0], png("red"), names[1])
    assert not list(tmp_path.iterdir())


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no image"):
        Uploads(tmp_path).add("ann", "a.png", b"hello")
