"""`report.html` in a real Chromium: on a phone and a desk, in both themes, with hostile names, and with 10,000 outputs.

Proves: failures and plots come before the images; nothing is wider than a phone; nothing is asked of elsewhere; the
size of the page does not grow with the number of outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.actors.chromium import CHROMIUM, DESK, NO_CHROMIUM, PHONE, open_chromium
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool, task
from tests.each_case import each_case

pytest.importorskip("playwright.sync_api", reason="needs playwright: ./scripts/setup dev")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

HOSTILE = (
    """<img src=x onerror="window.hacked=1"></text></svg><script>window.hacked=1</script>"' onload=window.hacked=1"""
)
START = 1_790_000_000.0
#: of an element that is seen and wider than the window, outside of what scrolls by itself
WIDER = """() => [...document.body.querySelectorAll("*")].filter((each) => !each.closest(".wide table") &&
    each.getBoundingClientRect().right > innerWidth + 0.5).map((each) => each.outerHTML.slice(0, 200))"""
#: the least contrast of texts with the page, by the rule of WCAG
CONTRAST = """() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const of = (each) => {
    const style = getComputedStyle(each), ink = light(each instanceof SVGElement ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  };
  return Math.min(...[...document.querySelectorAll("dt, dd, text, .faint, h2, h3, figcaption, summary")].map(of));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_chromium() as opened:
        yield opened


def folder_of(command: Command, count: int, failures: int = 12) -> Path:
    """A folder of `count` outputs with times, made from the entries of a small batch, with hostile names."""
    Path("jobs.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    pool = FakePool(sampled=lambda index: task("gpu-0", True))
    assert command("batch", "jobs.jsonl", "--out", "p", "--model", "shapes", pool=pool).code == 0
    folder = Path("p")
    entry = json.loads((folder / "manifest.jsonl").read_text().splitlines()[0])
    Image.new("RGB", (64, 64), "teal").save(folder / "image.png")
    lines = []
    for place in range(count):
        recipe = {**entry["recipe"], "seed": place, "prompt": HOSTILE, "model": f"{HOSTILE} {place % 3}"}
        tasks = [
            {"stage": stage, "worker": HOSTILE, "device": HOSTILE, "seconds": 1.0, "ended_at": START + 3 * place + at}
            for at, stage in enumerate(("encode", "sample", "decode"), 1)
        ]
        size = (folder / "image.png").stat().st_size
        fields = {**entry, "digest": f"{place:020x}", "recipe": recipe, "tasks": tasks, "index": place}
        lines.append(json.dumps({**fields, "file": "image.png", "file_bytes": size}))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    failed = [
        {"key": f"k{place}", "index": 0, "job_id": f"j-{place}", "kind": "bad_input", "message": HOSTILE + "x" * 300}
        | {"model": HOSTILE, "prompt": HOSTILE, "at": START + place, "seed": 1}
        for place in range(failures)
    ]
    (folder / "failures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in failed))
    return folder


def reported(command: Command, folder: Path) -> str:
    assert command("report", str(folder), "--price", "2.5").code == 0
    return f"file://{(folder / 'report.html').absolute()}"


@each_case("settings", [PHONE, DESK, {**PHONE, "color_scheme": "dark"}], ids=["phone", "desk", "phone, dark"])
def test_failures_and_plots_come_first_and_everything_fits(
    command: Command, browser: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    address, asked = reported(command, folder_of(command, 30)), []
    page = browser.new_page(**settings)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    assert page.locator("h2").all_inner_texts() == ["Failures", "Plots", "Timings and loads", "Outputs"]
    titles = page.locator(".plot figcaption").all_inner_texts()
    assert [title.split("\n")[0] for title in titles] == ["Throughput", "GPU use", "Seconds by stage", "Cost"]
    labels = page.locator(".plot svg[role=img]").evaluate_all("all => all.map((each) => each.ariaLabel)")
    assert labels[0].startswith("Throughput: 20 outputs a minute on average")
    assert labels[1] == "GPU use: 100% of the time of 1 worker on average"
    assert labels[2] == "Seconds by stage: encode 30 s, sample 30 s, decode 30 s"
    assert labels[3].startswith("Cost: 0.0625 for the GPU time")
    assert page.locator(".plot .failed").count() >= 2, "failures have a colour of their own"
    page.locator("summary", has_text="7 more").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= settings["viewport"]["width"]
    assert page.evaluate(WIDER) == []
    assert page.evaluate(CONTRAST) >= 4.5
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 0
    assert [url for url in asked if not url.startswith("data:")] == [address]
    page.close()


def test_the_page_of_ten_thousand_outputs_is_that_of_four_hundred(command: Command, browser: Any) -> None:
    folder = folder_of(command, 1_000)
    few = len(Path(reported(command, folder).removeprefix("file://")).read_bytes())
    folder = folder_of(command, 10_000)
    address = reported(command, folder)
    many = len(Path(address.removeprefix("file://")).read_bytes())
    assert many < 1.05 * few
    page = browser.new_page(**PHONE)
    page.goto(address)
    assert page.locator("img").count() == 400
    assert page.locator("img:not([loading=lazy])").count() == 0
    assert page.locator(".plot svg *").count() < 700, "a plot has a bounded number of parts"
    page.close()


def test_a_folder_without_times_says_so_and_invents_none(command: Command) -> None:
    folder = folder_of(command, 3)
    text = (folder / "manifest.jsonl").read_text().replace('"ended_at": 1790000', '"ended_at": 0, "was": 1790000')
    (folder / "manifest.jsonl").write_text(text)
    assert command("report", str(folder)).code == 0
    page = (folder / "report.html").read_text()
    assert "does not say when its outputs were generated" in page
    assert "Throughput" not in page
    assert "GPU use" not in page
    assert "Cost" not in page
    assert "Seconds by stage" in page
