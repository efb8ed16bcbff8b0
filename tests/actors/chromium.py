"""The Chromium of the system (Debian's package `chromium`) for tests of pages; none is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_CHROMIUM = "needs chromium; apt-get install chromium"
DESK = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@contextmanager
def open_chromium() -> Iterator[Any]:
    """A browser of playwright. Requires CHROMIUM, and the package playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # no sandbox: tests in containers run as root
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()
