"""The page in a real Chromium, over pools of fake engines: with a mouse, a keyboard alone, a phone, and keys.

Uses the Chromium of the system (Debian's package `chromium`), and downloads none. Every page must load without errors,
and nothing from elsewhere.
"""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.http.page import live_view
from modelpool.actors.http.page.pool_series import PoolSeries
from tests.actors.chromium import CHROMIUM, NO_CHROMIUM, PHONE, open_chromium
from tests.actors.fakes import FAIL
from tests.actors.http.conftest import served
from tests.actors.http.fake_page_pool import SLOW, open_page_pool

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: ./scripts/setup dev")
expect = playwright.expect
#: of each expectation; far beyond what a loaded machine takes
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

#: a prompt and a name that would run a script wherever it became markup
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"' onload=window.hacked=1 {{7*7}}"""
KEY = "k" * 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_pool() -> Iterator[ModelPool]:
    with open_page_pool() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_server(page_pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(page_pool, tmp_path_factory.mktemp("outputs")) as address:
        yield address


@pytest.fixture(autouse=True)
def _no_jobs_left(page_server: str) -> Iterator[None]:
    """Jobs that a test leaves would keep the pool from jobs of the next test."""
    yield
    end_all(page_server)


@contextmanager
def opened(browser: Any, address: str, **settings: Any) -> Iterator[Any]:
    """A page; at its end nothing may have failed, broken the policy of the page, or come from elsewhere."""
    problems: list[str] = []
    context = browser.new_context(**settings)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda asked: elsewhere(asked.url, address, problems))
    page.goto(address)
    try:
        yield page
        assert page.evaluate("window.hacked") is None
        assert problems == []
    finally:
        context.close()


def elsewhere(url: str, address: str, problems: list[str]) -> None:
    if not url.startswith((f"{address}/", f"blob:{address}/")):
        problems.append(f"asked elsewhere: {url}")


def live(page: Any) -> None:
    expect(page.locator("#connection")).to_have_text("Live")


def submit(address: str, *prompts: str, **headers: str) -> str:
    body = [{"model": "shapes", "prompt": prompt, "seed": place} for place, prompt in enumerate(prompts)]
    answer = requests.post(f"{address}/api/jobs", json=body, headers=headers, timeout=60)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def tile(page: Any, text: str) -> Any:
    return page.locator(".tile").filter(has_text=text).first


def end_all(address: str) -> None:
    for submission in requests.get(f"{address}/api/jobs", timeout=60).json()["submissions"]:
        if submission["state"] == "active":
            requests.delete(f"{address}/api/jobs/{submission['id']}", timeout=60)


def test_an_empty_pool_is_described_in_both_themes(browser: Any, tmp_path: Path) -> None:
    with open_page_pool(workers=1) as pool, served(pool, tmp_path) as address:  # noqa: SIM117
        with opened(browser, address, color_scheme="dark") as page:
            live(page)
            expect(page.locator(".gpu")).to_have_count(1)
            expect(page.locator(".gpu .state")).to_have_text("idle")
            expect(page.locator("#jobs-empty")).to_contain_text("No jobs yet")
            expect(page.locator("#queue-empty")).to_be_visible()
            expect(page.locator("#batches-empty")).to_be_visible()
            background = "getComputedStyle(document.body).backgroundColor"
            dark = page.evaluate(background)
            page.get_by_role("button", name="Auto theme").click()
            expect(page.get_by_role("button", name="Light theme")).to_be_visible()
            assert page.evaluate(background) != dark
            page.reload()
            expect(page.get_by_role("button", name="Light theme")).to_be_visible()


def test_a_gpu_that_runs_a_job_shows_no_image_of_the_job_before(browser: Any, tmp_path: Path) -> None:
    """A yellow square was next to the prompt "a green circle"."""
    with open_page_pool(workers=1) as pool, served(pool, tmp_path) as address, opened(browser, address) as page:
        live(page)
        card, image = page.locator(".gpu"), page.locator(".gpu img")
        submit(address, "a yellow square")
        expect(image).to_be_visible()
        submit(address, f"a green circle {SLOW}")
        expect(card).to_contain_text("a green circle")
        expect(image).to_be_hidden()
        end_all(address)
        expect(card.locator(".state")).to_have_text("idle")
        expect(image).to_be_visible()


def test_a_job_is_submitted_and_cancelled_by_keyboard_alone(browser: Any, page_server: str) -> None:
    with opened(browser, page_server) as page:
        live(page)
        page.keyboard.press("n")
        expect(page.locator("#form select[name=model]")).to_have_value("forms")
        expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
        page.keyboard.type(f"by keyboard {SLOW}")
        page.keyboard.press("Tab")
        page.keyboard.type("blurry")
        for _ in range(3):
            page.keyboard.press("Tab")
        expect(page.get_by_label("Steps", exact=True)).to_be_focused()
        page.keyboard.type("7")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#form-dialog")).not_to_be_visible()
        expect(page.locator("#toast")).to_contain_text("Submitted: 1 job")
        mine = tile(page, "by keyboard")
        expect(mine).to_have_attribute("data-state", "running")
        expect(page.locator(".gpu").filter(has_text="by keyboard")).to_contain_text("sample")
        # from the filter, Tab reaches the tiles; Enter opens the job
        page.keyboard.press("/")
        for _ in range(2):
            page.keyboard.press("Tab")
        expect(mine.locator("button")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#job-dialog")).to_be_visible()
        expect(page.locator("#job-dialog")).to_contain_text("upload 20.0 MiB in")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Cancel job")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".job-facts")).to_contain_text("cancelled")
        page.keyboard.press("Escape")
        expect(page.locator("#job-dialog")).not_to_be_visible()
        expect(tile(page, "by keyboard")).to_have_attribute("data-state", "cancelled")
        focused = page.evaluate("document.activeElement.className")
        assert focused == "tile-open", focused


def test_tab_goes_through_the_page_and_every_control_has_a_name(browser: Any, page_server: str) -> None:
    with opened(browser, page_server) as page:
        live(page)
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to content")).to_be_focused()
        seen = []
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
            if seen[-1] == "BODY":  # behind the last element: no trap
                break
        assert {"theme-button", "new-button", "filter-text", "filter-state"} <= set(seen)
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, input, select, textarea, progress, [role=img]")].filter((each) =>
                !(each.textContent.trim() || each.ariaLabel || each.labels?.length) && !each.closest("[hidden]"))
                .map((each) => each.outerHTML)"""
        )
        assert nameless == []


def test_a_hostile_prompt_is_text_everywhere(browser: Any, page_server: str) -> None:
    """In tiles, batches, the job's dialog and the form that takes over its settings."""
    batch = submit(page_server, HOSTILE, f"{HOSTILE} {FAIL}")
    submit(page_server, f"{HOSTILE} alone {SLOW}")
    with opened(browser, page_server) as page:
        live(page)
        expect(page.locator(".batch").first).to_contain_text("<script>window.hacked=1</script>")
        expect(tile(page, "alone")).to_contain_text("<img src=x")
        expect(page.locator(".gpu").filter(has_text="<img src=x")).to_have_count(1)
        page.locator(".tile[data-state=succeeded]").first.locator("button").click()
        expect(page.locator(".job-facts")).to_contain_text(HOSTILE)
        page.get_by_role("button", name="Use these parameters").click()
        expect(page.get_by_label("Prompt", exact=True)).to_have_value(HOSTILE)
        page.keyboard.press("Escape")
        assert page.locator("script").count() == 2
        assert page.evaluate("[...document.images].every((image) => image.src.startsWith('blob:') || !image.src)")
        page.get_by_label("Filter by prompt").fill(batch)
        expect(page.locator(".tile")).to_have_count(2)


def test_markup_would_run_no_script(browser: Any, page_server: str) -> None:
    """The second line of defence: the page's policy, if a text became markup in spite of the first."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(page_server)
    with page.expect_console_message(lambda said: "Content Security Policy" in said.text):
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<b onclick=window.hacked=1>x</b>')")
        page.evaluate("document.body.lastChild.click()")
    assert page.evaluate("window.hacked") is None
    context.close()


def test_a_failed_job_has_its_reason_and_is_retried(browser: Any, page_server: str) -> None:
    submit(page_server, f"a wrong one, to {FAIL}")
    with opened(browser, page_server) as page:
        live(page)
        failed = page.locator(".tile[data-state=failed]").filter(has_text="a wrong one")
        expect(failed).to_have_count(1)
        expect(failed).to_contain_text("asked to fail")
        failed.locator("button").click()
        expect(page.locator(".job-facts")).to_contain_text("the engine was asked to fail")
        page.locator("#job-dialog summary").click()
        expect(page.locator(".story table")).to_contain_text("failed")
        page.get_by_role("button", name="Retry", exact=True).click()
        page.keyboard.press("Escape")
        expect(failed).to_have_count(2)


def test_a_batch_is_followed_filtered_and_cancelled(browser: Any, page_server: str) -> None:
    """More jobs than the page shows at a time: the number of its elements stays bounded, the others are pages away."""
    batch = submit(page_server, *(f"batch {place}" for place in range(70)), *(f"rest {SLOW} {n}" for n in range(30)))
    with opened(browser, page_server) as page:
        live(page)
        mine = page.locator(".batch").filter(has_text="batch 0")
        expect(mine).to_contain_text(re.compile(r"(6\d|70) / 100"))  # the last short ones may be behind long ones
        expect(page.locator("#queue-models")).to_contain_text("shapes")
        expect(page.locator(".tile[data-state=succeeded]")).to_have_count(48)
        assert page.locator(".tile").count() <= 48 + 48
        image = page.locator(".tile[data-state=succeeded] img").first
        expect(image).to_have_attribute("src", re.compile("^blob:"))
        page.wait_for_function("image => image.naturalWidth > 0", arg=image.element_handle())
        mine.locator(".batch-open").click()
        expect(page.locator("#filter-batch")).to_contain_text(batch[:8])
        page.get_by_role("button", name="Older").click()
        short = int(re.search(r"(\d+) / 100", mine.inner_text()).group(1))
        expect(page.locator(".tile")).to_have_count(short - 48)
        expect(page.get_by_role("button", name="Older")).to_be_disabled()
        page.get_by_role("button", name="Newer").click()
        page.locator("#filter-state").select_option("active")
        expect(page.locator(".tile[data-state=succeeded]")).to_have_count(0)
        page.locator("#filter-batch").click()
        page.locator("#filter-state").select_option("")
        mine.get_by_role("button", name="Cancel").click()
        mine.get_by_role("button", name=f"Cancel {100 - short} jobs?").click()
        expect(mine).to_contain_text("100 / 100")
        expect(mine.get_by_role("button", name="Retry failed")).to_be_visible()


def test_the_page_fits_a_phone(browser: Any, page_server: str) -> None:
    submit(page_server, "x" * 300)
    with opened(browser, page_server, **PHONE) as page:
        live(page)
        expect(tile(page, "xxx")).to_be_visible()
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) <= 390
        page.get_by_role("button", name="New job").tap()
        expect(page.get_by_label("Prompt", exact=True)).to_be_visible()
        page.get_by_role("button", name="Add a LoRA").tap()
        box = page.locator("#form-dialog").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        page.get_by_label("Prompt", exact=True).fill("from a phone")
        page.get_by_label("Count").fill("2")
        page.get_by_label("Strength of the LoRA").fill("0.5")
        page.get_by_role("button", name="Submit").tap()
        expect(page.locator("#toast")).to_contain_text("Submitted: 2 jobs")
        expect(page.locator(".batch").first).to_contain_text("2 / 2")
        tile(page, "from a phone").locator("button").tap()
        expect(page.locator("#job-dialog")).to_be_visible()
        assert page.evaluate(width) <= 390


def workflow(prompt: str) -> dict[str, Any]:
    """A run, a decode of it, and a second run on the same latent."""
    run = {"kind": "sample", "request": {"model": "shapes", "prompt": "first", "steps": 4, "width": 64, "height": 64}}
    again = {"kind": "sample", "request": {"model": "shapes", "prompt": prompt, "steps": 4}, "strength": 0.5}
    composite = {"kind": "operation", "name": "image_composite", "settings": {"x": 0, "y": 0, "resize": True}}
    return {
        "nodes": {
            "one": run,
            "one-image": {"kind": "decode", "model": "shapes", "inputs": {"latent": "one"}},
            HOSTILE[:200]: {**again, "inputs": {"latent": "one"}},
            "two-image": {"kind": "decode", "model": "shapes", "inputs": {"latent": HOSTILE[:200]}},
            "both": {**composite, "inputs": {"destination": "one-image", "source": "two-image"}},
        },
        "output": "both",
    }


def test_nothing_is_added_to_a_form_before_its_choices_are_there(browser: Any, page_server: str) -> None:
    """Before: a LoRA that was added while the choices were on their way had no name, and the server refused the job."""
    waiting: list[Any] = []
    with opened(browser, page_server) as page:
        live(page)
        page.route("**/api/choices", lambda route: waiting.append(route))
        with page.expect_request("**/api/choices"):
            page.get_by_role("button", name="New job").click()
        for name in ("Add a LoRA", "Add an option"):
            expect(page.get_by_role("button", name=name)).to_be_disabled()
        waiting[0].continue_()
        page.get_by_role("button", name="Add a LoRA").click()
        expect(page.get_by_label("LoRA", exact=True)).not_to_have_value("")


def test_a_workflow_is_drawn_with_the_state_of_each_node(browser: Any, page_server: str) -> None:
    def queue(**request: Any) -> None:
        answer = requests.post(f"{page_server}/api/jobs", json=[{"seed": 3, **request}], timeout=60)
        assert answer.status_code == 201, answer.text

    queue(workflow=workflow(f"graph that runs {SLOW}"))
    with opened(browser, page_server) as page:
        live(page)
        tile(page, "graph that runs").locator("button").click()
        box = page.locator(".graph-box")
        expect(box).to_have_count(5)
        expect(box.filter(has_text="one-image")).to_contain_text("done in")
        expect(box.filter(has_text="two-image")).to_contain_text("waiting")
        running = page.locator(".graph-box[data-state=running]")
        expect(running).to_contain_text(re.compile(r"running \d+ of 10000"))
        running.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".graph-chosen")).to_contain_text("gpu-")
        expect(page.locator(".graph-lines .marked")).to_have_count(2)
        left = [each.bounding_box()["x"] for each in box.all()]
        assert len({round(each) for each in left}) == 4, "columns by depth"
    end_all(page_server)
    queue(workflow=workflow(f"graph that fails {FAIL}"))
    with opened(browser, page_server, **PHONE) as page:
        live(page)
        tile(page, "graph that fails").locator("button").tap()
        box = page.locator(".graph-box")
        failed = page.locator(".graph-box[data-state=failed]")
        expect(failed).to_contain_text("failed: RuntimeError")
        expect(box.filter(has_text="one-image")).to_contain_text("found")
        expect(box.filter(has_text="both")).to_contain_text("not run")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        tops = [each.bounding_box()["y"] for each in box.all()]
        assert len({round(each) for each in tops}) == 4, "the graph goes down"
        failed.tap()
        expect(page.locator(".graph-chosen")).to_contain_text("the engine was asked to fail")
    queue(model="shapes", prompt="with passes", passes=[{"scale": 2.0, "strength": 0.5}])
    with opened(browser, page_server) as page:
        live(page)
        tile(page, "with passes").locator("button").click()
        expect(page.locator(".graph-box")).to_have_count(4)
        expect(page.locator(".graph-box").filter(has_text="pass-1").first).to_contain_text("done")


def test_wrong_fields_are_named_at_the_field(browser: Any, page_server: str) -> None:
    with opened(browser, page_server) as page:
        live(page)
        page.get_by_role("button", name="New job").click()
        page.get_by_label("Prompt", exact=True).fill("anything")
        page.get_by_label("Width").fill("13")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#form-problem")).to_contain_text("width")
        expect(page.get_by_label("Width")).to_be_focused()
        expect(page.get_by_label("Width")).to_have_attribute("aria-invalid", "true")


def test_errors_of_several_fields_are_shown_at_each(browser: Any, page_server: str) -> None:
    with opened(browser, page_server) as page:
        live(page)
        page.get_by_role("button", name="New job").click()
        page.get_by_label("Prompt", exact=True).fill("anything")
        page.get_by_label("Width").fill("13")
        page.get_by_label("Steps", exact=True).fill("0")
        page.get_by_role("button", name="Add an option").click()
        page.get_by_label("Option", exact=True).select_option("pag")
        page.locator("[data-setting=scale]").fill("-5")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator(".field-error")).to_have_count(3)
        for control, said in (
            (page.get_by_label("Width"), "expected a multiple of 8"),
            (page.get_by_label("Steps", exact=True), "expected a whole number from 1"),
            (page.locator("[data-setting=scale]"), "expected a number from 0 to 100"),
        ):
            expect(control).to_have_attribute("aria-invalid", "true")
            message = control.get_attribute("aria-errormessage")
            expect(page.locator(f"#{message}")).to_contain_text(said)
        expect(page.get_by_label("Width")).to_be_focused()
        expect(page.locator("#option-rows .field-error")).to_have_count(1)
        page.get_by_label("Width").fill("64")
        expect(page.locator(".field-error")).to_have_count(2)
        expect(page.get_by_label("Width")).not_to_have_attribute("aria-invalid", "true")


def test_errors_that_no_field_has_are_above_the_form(browser: Any, page_server: str) -> None:
    with opened(browser, page_server) as page:
        live(page)
        page.get_by_role("button", name="New job").click()
        page.get_by_label("Prompt", exact=True).fill("anything")
        page.get_by_label("Strength", exact=True).fill("0.5")
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#start .field-error")).to_contain_text("needs a start image")
        page.get_by_label("Strength", exact=True).fill("")
        page.route("**/api/jobs", lambda route: route.fulfill(status=400, json={"error": {"message": HOSTILE}}))
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("#form-problem")).to_have_text(HOSTILE)
        expect(page.locator(".field-error")).to_have_count(0)


def test_the_form_sends_start_image_controlnet_options_and_lora_strength(
    browser: Any, page_server: str, tmp_path: Path
) -> None:
    image = tmp_path / "start <b>.png"
    Image.new("RGB", (64, 64), "teal").save(image)
    with opened(browser, page_server) as page:
        live(page)
        page.get_by_role("button", name="New job").click()
        page.get_by_label("Prompt", exact=True).fill("from an image")
        page.get_by_role("button", name="Add a LoRA").click()
        page.get_by_label("Strength of the LoRA").fill("0.35")
        page.locator("#start-image").set_input_files(image)
        expect(page.locator("#start-picked")).to_have_attribute("alt", "Start image: start <b>.png")
        page.wait_for_function("document.getElementById('start-picked').naturalWidth === 64")
        page.get_by_label("Strength", exact=True).fill("0.4")
        page.get_by_role("button", name="Add a ControlNet").click()
        expect(page.get_by_label("ControlNet", exact=True)).to_have_value("edges")
        page.get_by_label("Control image").set_input_files(image)
        page.get_by_label("Strength of the ControlNet").fill("0.9")
        page.get_by_role("button", name="Add an option").click()
        page.get_by_label("Option", exact=True).select_option("slg")
        page.get_by_label("layers").fill("7,8")
        page.get_by_role("button", name="Add an option").click()
        page.get_by_label("Option", exact=True).nth(1).select_option("freeu")
        page.get_by_label("Count").fill("2")
        with page.expect_request("**/api/jobs") as sent:
            page.get_by_role("button", name="Submit").click()
        body = sent.value.post_data_json
    content = base64.b64encode(image.read_bytes()).decode()
    assert body == {
        "model": "forms",
        "prompt": "from an image",
        "strength": 0.4,
        "image": content,
        "loras": [{"name": "light", "strength": 0.35}],
        "controls": [{"model": "edges", "strength": 0.9, "image": content}],
        "options": {"slg": {"layers": "7,8"}, "freeu": True},
        "n": 2,
    }
    fields = {name: value for name, value in body.items() if name not in ("image", "controls")}
    assert GenerateRequest(**fields, image=str(image), controls=[f"edges={image}:0.9"]).n == 2, "the fields are real"


def test_the_parameters_of_a_job_are_shown_and_taken_over(browser: Any, page_server: str) -> None:
    body = {"model": "shapes", "prompt": f"{HOSTILE} to see", "seed": 77, "loras": ["light:0.65"], "steps": 9, "cfg": 3}
    assert requests.post(f"{page_server}/api/jobs", json=body, timeout=60).status_code == 201
    with opened(browser, page_server) as page:
        live(page)
        tile(page, "to see").locator("button").click()
        shown = page.locator(".parameter-list")
        for name, value in (("LoRAs", "light 0.65"), ("Seed", "77"), ("Steps", "9"), ("Guidance (CFG)", "3")):
            expect(shown.locator("div").filter(has=page.locator("dt", has_text=name))).to_contain_text(value)
        expect(shown).to_contain_text(re.compile("Size64 . 64"))
        page.locator(".recipe summary").click()
        expect(page.locator(".recipe pre")).to_contain_text('"steps": 9')
        page.get_by_role("button", name="Use these parameters").click()
        expect(page.get_by_label("Prompt", exact=True)).to_have_value(f"{HOSTILE} to see")
        expect(page.get_by_label("Seed", exact=True)).to_have_value("77")
        expect(page.get_by_label("CFG", exact=True)).to_have_value("3")
        expect(page.get_by_label("Strength of the LoRA")).to_have_value("0.65")
        page.keyboard.press("Escape")
        tile(page, "to see").locator("button").click()
        page.get_by_role("button", name="Start from this image").click()
        expect(page.locator("#start-picked")).to_be_visible()
        page.wait_for_function("document.getElementById('start-picked').naturalWidth === 64")


def test_submissions_of_another_program_are_listed_without_their_results(
    browser: Any, page_pool: ModelPool, page_server: str, tmp_path: Path
) -> None:
    script = page_pool.submit(
        [GenerateRequest(model="forms", prompt=f"{HOSTILE} by hand {SLOW} {place}", seed=place) for place in range(3)],
        output=tmp_path,
    )
    try:
        with opened(browser, page_server) as page:
            live(page)
            mine = page.locator(".batch").filter(has_text="by hand")
            expect(mine).to_contain_text("another program")
            expect(mine).to_contain_text("0 / 3")
            expect(mine.get_by_role("button", name="Cancel")).to_be_hidden()
            running = page.locator(".tile[data-state=running]").filter(has_text="by hand").first
            expect(running).to_contain_text("<img src=x")
            running.locator("button").click()
            expect(page.locator("#job-dialog .parameters")).to_contain_text("Another program has submitted")
            expect(page.locator("#job-dialog .attempt").first).to_be_visible()
            expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)
            page.keyboard.press("Escape")
            page.locator("#filter-state").select_option("succeeded")
            mine.locator(".batch-open").click()
            expect(page.locator("#jobs-empty")).to_contain_text("Another program has submitted these jobs")
    finally:
        script.cancel()


def test_charts_show_the_load_of_the_pool_and_of_each_gpu(
    browser: Any, page_pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "PoolSeries", partial(PoolSeries, 0.05))
    with served(page_pool, tmp_path) as address, opened(browser, address, **PHONE) as page:
        live(page)
        submit(address, *(f"load {SLOW} {place}" for place in range(6)))
        images = page.locator("#charts svg")
        expect(images).to_have_count(3)
        expect(images.nth(0)).to_have_attribute("aria-label", re.compile(r"Waiting tasks in the last 5 min: now [1-9]"))
        expect(images.nth(1)).to_have_attribute("aria-label", re.compile("Outputs per minute in the last"))
        expect(images.nth(2)).to_have_attribute("aria-label", re.compile("GPUs busy .* now 100%"))
        expect(page.locator("#charts path.chart-line").first).to_have_attribute("d", re.compile("^M.+L"))
        spark = page.locator(".gpu .spark svg").first
        expect(spark).to_have_attribute("aria-label", re.compile(r"gpu-0 .* busy \d+% of the time, \d+% of the memory"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        end_all(address)


def test_a_page_connects_again_after_the_server_has_restarted(
    browser: Any, page_pool: ModelPool, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        with served(page_pool, tmp_path, port=port) as address:
            page = stack.enter_context(opened(browser, address))
            live(page)
        expect(page.locator("#connection")).to_have_text("Reconnecting")
        stack.enter_context(served(page_pool, tmp_path, port=port))
        live(page)
        submit(address, "after the restart")
        expect(tile(page, "after the restart")).to_be_visible()


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_with_images(
    browser: Any, page_pool: ModelPool, tmp_path: Path
) -> None:
    with served(page_pool, tmp_path, keys={"ann": KEY}) as address:
        submit(address, "with a key", Authorization=f"Bearer {KEY}")
        with opened(browser, address) as page:
            expect(page.locator("#key-dialog")).to_be_visible()
            page.locator("#key-input").fill("wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#key-problem")).to_contain_text("does not know")
            page.locator("#key-input").fill(KEY)
            page.keyboard.press("Enter")
            live(page)
            expect(page.locator("#key-button")).to_have_text("Key: ann")
            image = tile(page, "with a key").locator("img")
            expect(image).to_have_attribute("src", re.compile("^blob:"))
            page.reload()
            live(page)
            assert page.evaluate("localStorage.length") == 0
            assert KEY not in page.url
            page.locator("#key-button").click()
            page.get_by_role("button", name="Forget the key").click()
            expect(page.locator("#key-dialog")).to_be_visible()
            assert page.evaluate("sessionStorage.length") == 0
