"""The page at `/`, in a real Chromium."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.server.security import Limits
from tests.exported import Exported
from tests.runtime.server import Running, serving
from tests.runtime.serving import WAIT_S

LEN = "Return the length (the number of items) of an object."
MILLISECONDS = 1000 * WAIT_S


@pytest.fixture(scope="module")
def server(exported: Callable[[str], Exported]) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[str], Any]]:
    """``open_page(url)``: the page, which must neither complain nor ask anybody but its server."""
    opened = []

    def at(url: str) -> Any:
        page = browser.new_context().new_page()
        page.set_default_timeout(MILLISECONDS)
        opened.append((page, url, complaints := []))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else complaints.append(asked.url))
        page.goto(url)
        return page

    yield at
    for page, _, complaints in opened:
        page.context.close()
        # A refused request is something that the browser itself writes down.
        assert [text for text in complaints if "Failed to load resource" not in text] == []


def settings(page: Any, **values: str) -> None:
    page.get_by_text("Settings").click()
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_text("Settings").click()


def say(page: Any, text: str) -> None:
    page.get_by_label(re.compile("^Message")).fill(text)
    page.keyboard.press("Enter")


def is_over(page: Any, status: str = "The reply is complete.") -> None:
    page.get_by_role("status").filter(has_text=status).wait_for()


def eventually(page: Any, expression: str) -> None:
    """Wait until it is true. (playwright's own way evaluates strings in the page, which its policy forbids.)"""
    until = time.monotonic() + WAIT_S
    while not page.evaluate(expression):
        assert time.monotonic() < until, f"{expression} never was true"
        page.wait_for_timeout(50)


def replies(page: Any) -> list[str]:
    return [text.strip() for text in page.locator("article.assistant > .said").all_text_contents()]


def scripted(page: Any, *chunks: dict[str, Any], done: bool = True) -> None:
    """Answer the next requests with these events."""
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * done
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body="".join(lines)),
    )


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


pytestmark = pytest.mark.browser


def test_chats_tints_and_counts(server: Running, open_page: Callable[[str], Any]) -> None:
    page = open_page(server.url)
    page.get_by_role("heading", name="tiny-qwen35-mtp").wait_for()
    settings(page, Temperature="0")
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    say(page, "What does len do?")
    is_over(page)
    assert replies(page) == [LEN]
    drafted = page.locator("article.assistant .draft")
    assert drafted.count() > 0 and "".join(drafted.all_text_contents()) != LEN
    tint = "element => getComputedStyle(element).backgroundColor"
    plain = page.locator("article.assistant .own").first.evaluate(tint)
    assert drafted.first.evaluate(tint) != plain
    counts = page.locator(".counts").inner_text()
    assert re.fullmatch(
        r"13 tokens · [\d.]+ tok/s · \d+ of \d+ drafts accepted \(\d+ %\) · prompt 21 read, 0 kept", counts
    )
    say(page, "And map?")
    is_over(page)
    assert "0 kept" not in page.locator(".counts").nth(1).inner_text()
    assert [m["content"] for m in asked[1]["messages"]] == ["What does len do?", LEN, "And map?"]
    page.get_by_text("Settings").click()
    page.get_by_label(re.compile("Tint")).uncheck()
    assert drafted.first.evaluate(tint) == plain


def test_stop_regenerate_new(server: Running, open_page: Callable[[str], Any]) -> None:
    page = open_page(server.url)
    settings(page, Temperature="4", Seed="3")
    for key in ("", "Escape"):
        say(page, "Say anything.")
        eventually(page, "[...document.querySelectorAll('article')].at(-1).textContent.length > 40")
        if key:
            page.keyboard.press(key)
        else:
            page.get_by_role("button", name="Stop").click()
        is_over(page, "The reply is stopped.")
        server.idle()  # it stops there, too
    settings(page, Temperature="0")
    assert len(replies(page)) == 2
    page.get_by_role("button", name="Regenerate").click()
    is_over(page)
    assert len(replies(page)) == 2 and page.locator("article.user").count() == 2
    page.get_by_role("button", name="New chat").click()
    assert replies(page) == [] and page.get_by_role("button", name="Regenerate").is_disabled()
    say(page, "What does len do?")
    is_over(page)
    assert replies(page) == [LEN]


def test_thinking_is_folded_and_text_is_never_markup(server: Running, open_page: Callable[[str], Any]) -> None:
    page = open_page(server.url)
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    scripted(page, delta(reasoning_content="Let me "), delta(reasoning_content="see."), delta(content=nasty))
    say(page, "2 + 2?")
    is_over(page)
    thought = page.get_by_text("Let me see.")
    assert replies(page) == [nasty] and page.locator("article img").count() == 0 and not thought.is_visible()
    page.get_by_text("Thinking", exact=True).first.click()
    assert thought.is_visible()


def test_thinking_of_the_model(server: Running, open_page: Callable[[str], Any]) -> None:
    page = open_page(server.url)
    page.get_by_text("Settings").click()
    page.get_by_role("combobox", name="Thinking").select_option("on")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Temperature").fill("0")
    say(page, "What does len do?")
    is_over(page)
    events = server.events(temperature=0, max_tokens=12, chat_template_kwargs={"enable_thinking": True})
    thought = "".join(event["choices"][0]["delta"].get("reasoning_content", "") for event in events)
    assert thought and page.locator(".thinking .said").text_content() == thought


def test_with_a_key_and_the_keyboard_alone(
    exported: Callable[[str], Exported], open_page: Callable[[str], Any]
) -> None:
    with serving(exported("trained"), limits=Limits(api_key="abc")) as running:
        page = open_page(running.url)
        is_over(page, "the API key is missing or wrong")
        eventually(page, "document.activeElement.id === 'key'")
        page.keyboard.type("abc")
        page.keyboard.press("Tab")
        is_over(page, "Ready.")
        for _ in range(30):
            page.keyboard.press("Shift+Tab")
            if page.evaluate("document.activeElement.id") == "text":
                break
        page.keyboard.type("What does len do?")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("Say it.")
        page.keyboard.press("Enter")
        is_over(page)
        assert page.locator("article.user .said").text_content() == "What does len do?\nSay it."
        assert page.evaluate("document.activeElement.id") == "text"
        assert page.evaluate("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0


def test_errors_are_shown_and_the_chat_goes_on(server: Running, open_page: Callable[[str], Any]) -> None:
    page = open_page(server.url)
    settings(page, Temperature="0", **{"Top-p": "2"})
    say(page, "What does len do?")
    is_over(page, "Error: top_p")
    settings(page, **{"Top-p": "1"})
    scripted(page, delta(content="Half a"), {"error": {"message": "the engine failed"}})
    say(page, "What does len do?")
    is_over(page, "Error: the engine failed")
    page.unroute("**/v1/chat/completions")
    scripted(page, delta(content="Half a"), done=False)
    say(page, "What does len do?")
    is_over(page, "Error: the reply broke off")
    page.unroute("**/v1/chat/completions")
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    say(page, "What does len do?")
    is_over(page)
    assert replies(page)[-1] == LEN and len(asked[0]["messages"]) == 1


def test_every_control_has_a_name(server: Running, open_page: Callable[[str], Any]) -> None:
    page = open_page(server.url)
    page.get_by_text("Settings").click()
    controls = page.locator("input, select, textarea, button, summary")
    assert controls.count() > 12
    for i in range(controls.count()):
        snapshot = controls.nth(i).aria_snapshot()
        role = snapshot.split('"')
        assert (len(role) > 1 and role[1].strip()) or "text:" in snapshot, snapshot
