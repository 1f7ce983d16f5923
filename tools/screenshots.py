"""Takes the pictures of the live page: `.venv/bin/python -m tools.screenshots` writes docs/images/page-*.png.

It needs `make dev` and chromium on the PATH. A stack with the demo model gets load, and a decode worker is
killed and started again meanwhile."""

import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.stack import ROOT, Stack

LOAD_S, NUM_CLIENTS = 30.0, 6
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
QUESTIONS = (
    "Tell me a long story about a river.",
    "Hello!",
    "What can you do?",
    "Is everything up and running?",
)
SIZE = {"width": 1280, "height": 1000}


def start_worker(stack: Stack, name: str) -> None:
    """A worker of the demo model, under this name."""
    stack.worker(name.partition("-")[0], "--name", name, engine="embedded", name=name)


def put_load(stack: Stack, ended: threading.Event, seed: int) -> None:
    """One client, which sends requests one after the other."""
    draw = random.Random(seed)
    while not ended.is_set():
        message = {"role": "user", "content": " ".join(draw.choices(QUESTIONS, k=draw.randrange(1, 30)))}
        stack.post("/v1/chat/completions", messages=[message], max_tokens=draw.randrange(20, 200))
        time.sleep(draw.random())  # a person's pace


def replace_a_worker(stack: Stack) -> None:
    """Kill a decode worker under its streams, and start it again."""
    time.sleep(LOAD_S / 3)  # of load
    next(each for each in stack.processes if each.name == "decode-1").kill()
    time.sleep(2)  # two snapshots
    start_worker(stack, "decode-1")


def take(browser: Browser, stack: Stack, scheme: str) -> None:
    """One picture, after a question in the page's chat."""
    page = browser.new_page(color_scheme="dark" if scheme == "dark" else "light", viewport=SIZE)  # type: ignore[arg-type]  # a TypedDict
    page.goto(stack.url)
    page.wait_for_selector("#slowest code")
    page.click("#ask button")
    page.wait_for_selector("#turns .answer")
    page.wait_for_selector("#ask button:enabled")
    page.screenshot(path=ROOT / f"docs/images/page-{scheme}.png", full_page=True)
    page.close()


def main() -> None:
    """Start the stack, load it, take both pictures while it still has load."""
    chromium = shutil.which("chromium") or sys.exit(
        "error: no chromium on the PATH; on Debian: apt-get install chromium"
    )
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack, sync_playwright() as driver:
        stack.frontend()
        for name in WORKERS:
            start_worker(stack, name)
        stack.wait_ready(2, 2)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        ended = threading.Event()
        load = [threading.Thread(target=put_load, args=(stack, ended, seed)) for seed in range(NUM_CLIENTS)]
        for client in load:
            client.start()
        replace_a_worker(stack)
        stack.wait_ready(2, 2)
        time.sleep(LOAD_S / 3)  # of load
        for scheme in ("light", "dark"):
            take(browser, stack, scheme)
        ended.set()
        for client in load:
            client.join()
        browser.close()


if __name__ == "__main__":
    main()
