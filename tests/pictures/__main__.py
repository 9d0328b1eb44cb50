"""The pictures of the report in docs/pictures, of the run in this folder: `make docs-pictures`."""

import json
import sys
import tempfile
from pathlib import Path

from dtrrun.views.html import page
from tests.pictures.browser import chromium, missing

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "pictures"
LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}
"""By name of the picture: how the page is opened."""


def example():
    """The page that is shown."""
    run, profile = (json.loads((HERE / name).read_text()) for name in ("run.json", "profile.json"))
    return page(run, profile)


def take(folder):
    """A picture of each look into `folder`."""
    with tempfile.TemporaryDirectory() as made, chromium() as opened:
        file = Path(made, "report.html")
        file.write_bytes(example())
        for name, look in LOOKS.items():
            (Path(folder) / f"report-{name}.png").write_bytes(opened(file, **look).picture())


if __name__ == "__main__":
    why = missing()
    if why:
        sys.exit(f"no pictures of the report: {why}")
    DOCS.mkdir(exist_ok=True)
    take(DOCS)
    from PIL import Image

    for name in LOOKS:  # a third of the bytes, with 255 colours
        path = DOCS / f"report-{name}.png"
        Image.open(path).convert("RGB").quantize(255).save(path, optimize=True)
