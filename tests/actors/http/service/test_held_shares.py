"""What one user may hold, and that it takes nothing from others."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from modelpool.actors.http.service import uploads as uploads_module
from modelpool.actors.http.service.held_shares import HeldShare, HeldShares
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.uploads import Uploads


def png(number: int) -> bytes:
    content = BytesIO()
    Image.new("RGB", (16, 16), (number, 0, 0)).save(content, "PNG")
    return content.getvalue()


def test_a_share_is_of_one_owner_and_of_all_and_comes_back() -> None:
    shares = HeldShares("pixels", "held_pixels", 10, 6)
    ann, bob = HeldShare(shares, "ann"), HeldShare(shares, "bob")
    ann.take(6)
    with pytest.raises(HttpProblem) as refused:
        ann.take(1)
    assert (refused.value.status, refused.value.limit, "Retry-After" in refused.value.headers) == (
        429,
        "held_pixels",
        True,
    )
    bob.take(4)
    with pytest.raises(HttpProblem):
        bob.take(1)
    ann.free()
    ann.close()
    assert (shares.held("ann"), shares.held("bob")) == (0, 4)
    bob.take(2)


def test_uploads_of_one_user_displace_no_uploads_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = max(len(png(number)) for number in range(20))
    uploads = Uploads(tmp_path, most_bytes=16 * size, most_bytes_of_user=4 * size)
    uploads.add("bob", "b.png", png(1))
    for number in range(20):
        uploads.add("ann", f"{number:02}.png", png(number))
    assert uploads.names("bob") == ("b.png",)
    assert uploads.names("ann")[-1] == "19.png"
    assert len(uploads.names("ann")) <= 5
    monkeypatch.setattr(uploads_module, "MOST_FILES_OF_OWNER", 2)
    again = Uploads(tmp_path, most_bytes=1 << 20)  # counts what an earlier server has stored
    again.add("ann", "new.png", png(1))
    assert len(again.names("ann")) == 2
    assert again.names("bob") == ("b.png",)
