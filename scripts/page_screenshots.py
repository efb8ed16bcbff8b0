"""Renders the screenshots of the web page in docs/ with the system's Chromium, from a pool of simulated GPUs.

    .venv/bin/python scripts/page_screenshots.py [--out FOLDER]

Starts `modelpool serve` with the example model: empty at first, then busy, with a job that fails since the file of its
LoRA was removed after it was submitted. Needs playwright and Chromium, and takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EXAMPLE = ROOT / "examples" / "shapes"
LORAS, REMOVED = "loras", "removed"
GPUS = 4
#: sizes of the window of the page on a desk and on a phone
DESK: dict[str, Any] = {"viewport": {"width": 1360, "height": 960}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}
MOST_SECONDS = 300.0
#: ended images that the page of the busy pool shows
ENDED = 12
#: replaces the ids of the node by its name, and a folder by another one, wherever the page shows them
RENAME = """([name, folder]) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.replaceAll(folder, "/data").replaceAll(/\\b[0-9a-f]{56}\\b/g, "node-1");
    walker.currentNode.data = text.replaceAll(name, "node-1");
  }
}"""
COLORS, SHAPES = ("red", "green", "blue", "cyan", "purple", "yellow"), ("circle", "square", "triangle")


def main() -> int:
    """Write the screenshots; return the exit code."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for the images (default: docs)")
    folder = parser.parse_args().out
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("page_screenshots: found no Chromium; install it: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as address, sync_playwright() as driver:
        # no sandbox: containers run as root
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(**DESK)
        page.set_default_timeout(MOST_SECONDS * 1000)
        page.goto(address)
        page.locator(".gpu .state[data-state=idle]").nth(GPUS - 1).wait_for()
        shoot(page, folder / "web_page_empty.png", scratch)
        submit_work(address, Path(scratch) / LORAS)
        page.locator(".tile[data-state=succeeded]").nth(ENDED - 1).wait_for()
        page.locator(".tile[data-state=failed]").first.wait_for()
        page.wait_for_timeout(1000)  # thumbnails appear
        shoot(page, folder / "web_page_busy.png", scratch)
        phone = browser.new_page(**PHONE)
        phone.goto(address)
        phone.locator(".tile").first.wait_for()
        phone.wait_for_timeout(1000)
        shoot(phone, folder / "web_page_phone.png", scratch)
        page.locator(".tile[data-state=failed]").first.click()
        page.get_by_text("Story", exact=True).click()
        page.locator(".story tr").nth(1).wait_for()
        shoot(page, folder / "web_page_failed.png", scratch)
        browser.close()
    return 0


def shoot(page: Any, path: Path, scratch: str) -> None:
    """Write a screenshot, in which nothing is named after this machine."""
    page.evaluate(RENAME, [page.locator("#nodes tbody th").first.text_content(), scratch])
    page.screenshot(path=path)


@contextmanager
def served(scratch: Path) -> Iterator[str]:
    """Run `modelpool serve` with files in `scratch`; yield its address."""
    loras = scratch / LORAS
    shutil.copytree(EXAMPLE / "loras", loras)
    write_lora(loras / f"{REMOVED}.safetensors")
    (scratch / "pool.toml").write_text(
        f'[pool]\ndevice = "sim"\nworkers = {GPUS}\nvram = "64MiB"\n'
        f'[models]\nfolders = ["{EXAMPLE / "models"}"]\nloras = ["{loras}"]\n'
    )
    words = ["serve", "--config", str(scratch / "pool.toml"), "--port", "0", "--out", str(scratch / "outputs")]
    command = [sys.executable, "-m", "modelpool", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None, "a pipe"
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield found[0]
                return
        raise SystemExit(f"page_screenshots: the server has ended:\n{said}")
    finally:
        process.terminate()
        process.wait()


def write_lora(path: Path) -> None:
    """Write a LoRA that no other file equals."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(EXAMPLE / "loras" / "light.safetensors")
    save_file({name: value / 2 if value.ndim == 2 else value for name, value in weights.items()}, path)


def submit_work(address: str, loras: Path) -> None:
    """Submit a batch of all shapes, a job that fails, and a large batch behind them."""
    prompts = [f"a {color} {shape}" for color in COLORS for shape in SHAPES]
    wide = [{"prompt": prompt, "seed": seed, "loras": ["light:0.8"]} for seed, prompt in enumerate(prompts)]
    long = [{"prompt": prompts[place % len(prompts)], "seed": place} for place in range(1000)]
    failing: list[dict[str, Any]] = [{"prompt": "a purple square", "seed": 4, "loras": [f"{REMOVED}:1"]}]
    for requests in (wide, failing, long):
        body = json.dumps([{"model": "shapes", "steps": 12, **request} for request in requests]).encode()
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(f"{address}/api/jobs", data=body, headers=headers)
        with urllib.request.urlopen(call, timeout=MOST_SECONDS):
            pass
        if requests is failing:
            (loras / f"{REMOVED}.safetensors").unlink()


if __name__ == "__main__":
    sys.exit(main())
