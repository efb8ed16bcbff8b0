"""The page in a real Chromium, over pools of fake engines: with a mouse, a keyboard alone, a phone, and keys.

Uses the Chromium of the system (Debian's package `chromium`), and downloads none. Every page must load without errors,
and nothing from elsewhere.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from modelpool import ModelPool
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
    """Jobs that a test leaves would keep the pool from those of the next one."""
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
        page.get_by_label("Strength").fill("0.5")
        page.get_by_role("button", name="Submit").tap()
        expect(page.locator("#toast")).to_contain_text("Submitted: 2 jobs")
        expect(page.locator(".batch").first).to_contain_text("2 / 2")
        tile(page, "from a phone").locator("button").tap()
        expect(page.locator("#job-dialog")).to_be_visible()
        assert page.evaluate(width) <= 390


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
