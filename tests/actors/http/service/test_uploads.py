"""Uploaded images: names, owners, and the bound of the folder."""

from __future__ import annotations

import os
import re
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from modelpool.actors.http.service.form_names import with_plain_names
from modelpool.actors.http.service.uploads import Uploads
from modelpool.pool.values.core.errors import UserError


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


def test_the_number_of_an_image_fits_a_long_name(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    for name in ("a" * 236 + ".png", "\u00e9" * 118 + ".png", "?" * 78 + ".png", "a." + "b" * 238):
        assert uploads.add("ann", name, png("red")) == name
        numbered = uploads.add("ann", name, png("blue"))
        assert " (1)" in numbered
        assert (uploads.image("ann", name).getpixel((0, 0)), uploads.image("ann", numbered).getpixel((0, 0))) == (
            (255, 0, 0),
            (0, 0, 255),
        )


def test_a_name_that_workflows_write_for_another_image_is_refused(tmp_path: Path) -> None:
    """LoadImage reads "a.png [input]" as a.png."""
    with pytest.raises(UserError, match=r"filename: found 'a.png \[input\]', expected a name .* \[input\] last"):
        Uploads(tmp_path).add("ann", "a.png [input]", png("red"))


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


@pytest.mark.parametrize(
    "name",
    [
        "../a.png", "/a.png", ".a.png", "", "a\\b.png", "a\n.png", "a" * 300, "..", " ", "a\x00.png", "a\x7f.png",
        "a\x85.png", "a\u2028.png", "gnp\u202e.exe", "\ud800.png", "\u732b" * 90, "a/../b.png", "..\\a.png",
    ],
)  # fmt: skip
def test_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads")
    for names in ((name, ""), ("a.png", name or "..")):
        with pytest.raises(UserError):
            uploads.add("ann", names[0], png("red"), names[1])
    assert not list(tmp_path.iterdir())


NAMES = (
    "\u732b.png", "\u00fcber Gr\u00f6\u00dfe.png", "it's.png", "a,b.png", "a@2x.png", "a&b.png", "a#1.png", "x [1].png",
    "50%.png", "%41.png", "a+b=c;d.png", "what?.png", "12:30.png", "a<b>.png", 'say "hi".png', "a|b*.png", "dot..png",
    "end.", "end ", "Screenshot 2024-01-01 at 9.44.12\u202fAM.png", "\U0001f469\u200d\U0001f680.png", "\u200bzero.png",
    "CON.png", "com1", "nul", "no ending", "\u0939\u093f\u0928\u094d\u0926\u0940.png", "~x.png", "-x.png", "$(x).png",
    "\u00e9" * 100 + ".png",
)  # fmt: skip


def test_ordinary_names_are_kept_and_found(tmp_path: Path) -> None:
    """What callers see is the name that they sent; on disk no file has a name that some system refuses."""
    uploads = Uploads(tmp_path)
    for subfolder in ("", "M\u00e4rz/\u732b & Co"):
        for name in NAMES:
            assert uploads.add("ann", name, png("red"), subfolder) == name
        shown = {f"{subfolder}/{name}" if subfolder else name for name in NAMES}
        assert shown <= set(uploads.names("ann"))
        assert all(uploads.content("ann", name) == png("red") for name in shown)
    stored = [path.name for path in tmp_path.rglob("*")]
    reserved = re.compile(r'(?i)(con|com1|nul)(\.|$)|.*[<>:"|?*\\]|.*[. ]$')
    assert not [name for name in stored if reserved.match(name) or len(name.encode()) > 255]


def test_names_of_files_in_forms_as_clients_write_them() -> None:
    """Each with a part behind it, whose bytes look like a name."""
    picture = b"\x89PNG\r\n\r\n; filename*=utf-8''x"
    cat = "\u732b.png".encode()
    for written, expected in (
        (b'filename="%s"' % cat, cat),
        (b"filename*=utf-8''%E7%8C%AB.png", cat),
        (b"filename*=UTF-8'ja'%E7%8C%AB.png", cat),
        (b"filename=\"x.png\"; filename*=utf-8''%E7%8C%AB.png", cat),
        (b"filename*=utf-8''%E7%8C%AB.png; filename=\"=?utf-8?B?54yrLnBuZw==?=\"", cat),
        (b"filename*=iso-8859-1''%E9.png", "\u00e9.png".encode()),
        (b"filename*=utf-8''a%22b%5C.png", b'a\\"b\\\\.png'),
        (b"filename=\"x.png\"; filename*=nonsense''%E7.png", b"x.png"),
        (b"filename=\"x.png\"; filename*=utf-8''a%0D%0Ab.png", b"x.png"),
    ):
        head = b'\r\nContent-Disposition: form-data; name="image"; '
        tail = b"\r\nContent-Type: image/png\r\n\r\n" + picture + b"\r\n--edge--\r\n"
        found = with_plain_names(b"--edge" + head + written + tail, 'multipart/form-data; boundary="edge"')
        assert found.endswith(tail)
        assert found.startswith(b"--edge" + head.rstrip())
        assert b'filename="' + expected + b'"' in found.partition(b"\r\n\r\n")[0], written


def test_one_name_in_two_forms_of_unicode_is_one_image(tmp_path: Path) -> None:
    """macOS writes an accent as a character of its own."""
    uploads = Uploads(tmp_path)
    composed, parts = "\u00e9t\u00e9.png", "e\u0301te\u0301.png"
    assert uploads.add("ann", parts, png("red"), "e\u0301") == composed
    assert uploads.add("ann", composed, png("red"), "\u00e9") == composed
    assert uploads.add("ann", parts, png("blue"), "\u00e9") == "\u00e9t\u00e9 (1).png"
    assert uploads.names("ann") == ("\u00e9/\u00e9t\u00e9 (1).png", "\u00e9/\u00e9t\u00e9.png")
    for name in (f"\u00e9/{composed}", f"e\u0301/{parts} [input]"):
        assert uploads.content("ann", name) == png("red")


def test_a_file_and_a_folder_of_one_name_are_refused_by_name(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.add("ann", "a.png", png("red"), "folder")
    uploads.add("ann", "b.png", png("red"))
    with pytest.raises(UserError, match="filename: found 'folder', expected another name"):
        uploads.add("ann", "folder", png("red"))
    with pytest.raises(UserError, match=r"subfolder: found 'b\.png', expected another name"):
        uploads.add("ann", "c.png", png("red"), "b.png")


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no image"):
        Uploads(tmp_path).add("ann", "a.png", b"hello")
