"""The live page in headless Chromium: what it shows, what it may ask, what it must not show."""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S, wait_for

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")

CANARY = "canary-4711"
SUGGESTED = "everything up and running?"
CALL = "<|channel|>commentary to=functions.get_system_health<|message|>{}<|call|>"
ANSWER = "<|channel|>final<|message|>healthy<|return|>"
NUM_STREAMS = 1000
REBOUND = "rebound.example"
"""A name of another server that points to this one."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Mockers that generate five tokens a second; in the page's chat, a call of its tool and an answer."""
    folder = tmp_path_factory.mktemp("page")
    script, slow = folder / "script.yaml", folder / "slow.yaml"
    script.write_text(json.dumps([{"when": SUGGESTED, "answers": [CALL, ANSWER]}]))
    slow.write_text(
        f"prefill_tokens_per_s: 50000\ndecode_step_ms: 200\nkv_transfer_ms: 1\nscript: {script}\n"
    )
    with Stack(folder) as stack:
        stack.frontend()
        for name in ("prefill-0", "decode-0", "decode-1"):
            stack.worker(name.split("-")[0], "--name", name, yaml=slow, name=name)
        stack.wait_ready(1, 2)
        yield stack


@contextmanager
def opened(browser: Any, stack: Stack) -> Iterator[Any]:
    """The page, drawn; at the end nothing was wrong in the console and no other host was asked."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda line: wrong.append(line.text) if line.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(stack.url)
    page.wait_for_selector(".worker")
    yield page
    assert (wrong, [url for url in asked if not url.startswith(f"{stack.url}/")]) == ([], [])
    context.close()


def words(page: Any, selector: str) -> str:
    found: str = page.inner_text(selector)
    return found


def send(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.click("#ask button")
    page.wait_for_selector("#ask button:enabled")


def test_the_state_of_the_fleet_is_drawn(browser: Any, stack: Stack) -> None:
    stack.answer("/v1/completions", prompt="one two three", max_tokens=2)
    with opened(browser, stack) as page:
        page.wait_for_selector("#slowest code")
        assert words(page, "#status") == "serving"
        assert words(page, "#model") == MODEL
        assert page.locator(".worker .state").all_inner_texts() == ["ready"] * 3
        for name in ("prefill-0", "decode-0", "decode-1"):
            assert name in words(page, "#drawing")
        assert page.locator("#flows path").count() == 2
        assert "stream" in words(page, "#slowest")
        assert page.locator("#ttft path.p50, #itl path.p99").count() == 2


def test_a_worker_that_guesses_has_its_tokens_per_step(browser: Any, stack: Stack) -> None:
    (worker,) = stack.get("/fleet").json()["workers"][:1]
    with opened(browser, stack) as page:
        assert "tokens/step" not in words(page, "#drawing")
        guessing = json.dumps(worker | {"tokens_per_step": 2.13})
        assert "2.1 tokens/step · " in page.evaluate(f"card({guessing}).textContent")


def test_another_ones_prompt_and_answer_are_nowhere_in_the_page(browser: Any, stack: Stack) -> None:
    message = {"role": "user", "content": f"{CANARY} <b>bold</b>"}
    answer = stack.answer("/v1/chat/completions", messages=[message], max_tokens=8, temperature=0)
    given = answer["choices"][0]["message"]
    with opened(browser, stack) as page:
        page.wait_for_selector("#slowest code")
        for text in (page.content(), stack.get("/fleet").text):
            assert CANARY not in text
            assert not given["content"] or given["content"] not in text


def test_the_chat_calls_a_tool_shows_stages_and_takes_no_text_for_markup(browser: Any, stack: Stack) -> None:
    html = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    with opened(browser, stack) as page:
        page.on("dialog", lambda _: pytest.fail("a script ran"))
        send(page, "")  # the suggestion
        assert words(page, "#turns .user").endswith(SUGGESTED)
        assert '"status":"healthy"' in words(page, "#turns .tool")
        assert "healthy" in words(page, "#turns .answer")
        assert page.locator("#turns .stages .bar").count() == 2
        assert "stream" in words(page, "#turns .stages")
        send(page, html)
        assert words(page, "#turns .user >> nth=1") == html
        assert page.locator("#turns img, #turns script").count() == 0


def test_a_key_stays_in_memory(browser: Any, stack: Stack) -> None:
    with opened(browser, stack) as page:
        page.fill("#key", "sk-secret")
        with page.expect_request(lambda request: "sk-secret" in request.headers.get("authorization", "")):
            page.press("#key", "Tab")
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert kept == [0, 0, "", f"{stack.url}/"]


def test_it_is_legible_in_both_schemes_and_fits(browser: Any, stack: Stack) -> None:
    with opened(browser, stack) as page:
        for scheme, width in product(("light", "dark"), (1280, 400)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            ratios = page.evaluate(
                """() => [...document.querySelectorAll('h2, dd, dt, small, strong, .state, a')].map(each => {
                  const light = (color) => color.match(/\\d+/g).slice(0, 3).map(each => each / 255)
                    .map(each => each <= 0.04 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
                    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
                  let behind = each;
                  while (/, 0\\)$/.test(getComputedStyle(behind).backgroundColor))
                    behind = behind.parentElement;
                  const both = [getComputedStyle(each).color, getComputedStyle(behind).backgroundColor]
                    .map(light);
                  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
                })"""
            )
            assert min(ratios) >= 4.5  # WCAG 2.2, AA
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
            assert dark is (scheme == "dark")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_a_thousand_streams_need_no_more_elements(browser: Any, stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    with opened(browser, stack) as page, ExitStack() as streams:
        before = page.evaluate("document.querySelectorAll('*').length")
        for _ in range(NUM_STREAMS):
            stream = streams.enter_context(socket.create_connection(("127.0.0.1", stack.port)))
            stream.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        wait_for(lambda: f"{NUM_STREAMS:,}" in words(page, "#stages"))
        assert f"{NUM_STREAMS:,}" in words(page, "#totals")
        after = page.evaluate("document.querySelectorAll('*').length")
        assert after < before + 100  # the ten slowest, the curves; not the streams
    stack.wait_idle()


def test_a_killed_worker_turns_red(browser: Any, stack: Stack) -> None:
    with opened(browser, stack) as page:
        next(process for process in stack.processes if process.name == "decode-1").kill()
        page.wait_for_selector("[data-state=lost]")
        assert "decode-1" in words(page, "[data-state=lost]")
        red = page.evaluate("getComputedStyle(document.querySelector('[data-state=lost] .state')).color")
        assert red == page.evaluate("getComputedStyle(document.querySelector('.bad, .is-bad .state')).color")
        assert words(page, "#status") == "serving, 1 worker not ready"


def test_a_frontend_that_does_not_answer_is_said(browser: Any, stack: Stack) -> None:
    frontend = stack.processes[0]
    with opened(browser, stack) as page:
        frontend.signal(SIGSTOP)
        try:
            page.wait_for_selector("#problem:visible")
            assert "does not answer" in words(page, "#problem")
        finally:
            frontend.signal(SIGCONT)
        page.wait_for_selector("#problem", state="hidden")


def test_pages_of_other_origins_and_names_read_nothing(browser: Any, stack: Stack) -> None:
    page = browser.new_page()
    read = "url => fetch(url).then(answer => answer.text().then(() => answer.status), () => 'blocked')"
    page.goto(f"http://localhost:{stack.port}/live")  # another origin
    assert page.evaluate(read, f"{stack.url}/fleet") == "blocked"
    assert page.goto(f"http://{REBOUND}:{stack.port}/").status == 403
    for path in ("/fleet", "/health", "/metrics", "/page/page.js"):
        assert page.evaluate(read, path) == 403
    page.close()
