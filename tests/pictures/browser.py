"""A headless Chromium, for looking at the report: playwright's own, or one that is installed."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = (1100, 900), (390, 844)


def missing():
    """Why there is no browser; None where there is one."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "needs playwright (pip install playwright)"
    return None if executable() else "needs Chromium (playwright install chromium-headless-shell)"


def executable():
    from playwright.sync_api import sync_playwright

    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        with sync_playwright() as playwright:
            own = playwright.chromium.executable_path
        found = own if os.path.exists(own) else None
    return found


class Opened:
    """A page in the browser, with what it complained of and asked of the network."""

    def __init__(self, page, complaints, requests):
        self.page, self.complaints, self.requests = page, complaints, requests

    def picture(self, whole=True):
        return self.page.screenshot(full_page=whole, animations="disabled")


@contextmanager
def chromium():
    """A function that opens a file: `opened(path, dark=False, phone=False)`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--font-render-hinting=none", "--disable-lcd-text"]
        browser = playwright.chromium.launch(executable_path=executable(), args=arguments)

        def opened(path, dark=False, phone=False, script=True):
            width, height = PHONE if phone else WIDE
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
                device_scale_factor=1,
                has_touch=phone,
                offline=True,
                java_script_enabled=script,
                locale="en-GB",
            )
            page = context.new_page()
            complaints, requests = [], []
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(Path(path).resolve().as_uri())
            page.wait_for_load_state("load")
            if script:
                page.evaluate(
                    "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
                )
            return Opened(page, complaints, requests)

        yield opened
        browser.close()
