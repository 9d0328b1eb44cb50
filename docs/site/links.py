"""Links between the pages of docs/ and to files of the repository, as they stand in the Markdown.

Without mkdocs, so that the tests can use it. Paths are those of the repository, with `/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
SHOWN = (".md", ".svg", ".png", ".jpg", ".html")
"""What the site shows as it is; a link to anything else leads to a page with its text."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1`*\s*$", re.MULTILINE | re.DOTALL)


def links(markdown: str, origin: str) -> Iterator[tuple[str, str]]:
    """Target, as a path in the repository, and anchor (`#…` or nothing) of each relative link in `origin`."""
    for match in LINK.finditer(FENCE.sub("", markdown)):
        yield target(match[1], origin), match[2] or ""


def target(link: str, origin: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def page_of(path: str) -> str:
    """The place on the site, below docs/, of a path in the repository."""
    inside = path.startswith(f"{DOCS}/")
    if inside and path.endswith(SHOWN):
        return path.removeprefix(f"{DOCS}/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def origin_of(page: str) -> str:
    """The other way round, for pages of Markdown."""
    return page.removeprefix("source/") if page.startswith("source/") else f"{DOCS}/{page}"


def on_site(markdown: str, origin: str) -> str:
    """`markdown` with its links, but not its code, led to where the site has their targets."""
    here = posixpath.dirname(page_of(origin))

    def led(match: re.Match[str]) -> str:
        return posixpath.relpath(page_of(target(match[1], origin)), here or ".") + (match[2] or "")

    led_to, last = "", 0
    for fence in FENCE.finditer(markdown):
        led_to += LINK.sub(led, markdown[last : fence.start()]) + fence[0]
        last = fence.end()
    return led_to + LINK.sub(led, markdown[last:])


def pages() -> list[str]:
    """All Markdown of docs/, and the changelog."""
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md"))
    return [*sorted(found), "CHANGELOG.md"]


def sources() -> list[str]:
    """Files and folders that pages link to and that are no pages of docs/; with each folder, its files."""
    found: set[str] = {"CHANGELOG.md"}
    for origin in pages():
        for path, _ in links((ROOT / origin).read_text(), origin):
            if page_of(path).startswith("source/") and (ROOT / path).exists():
                found.add(path)
                found.update(f"{path}/{name}" for name in files_in(path))
    return sorted(found)


def files_in(path: str) -> list[str]:
    """The names of a folder's sources; none where it is no folder."""
    folder = ROOT / path
    if not folder.is_dir():
        return []
    return sorted(one.name for one in folder.iterdir() if one.suffix in (".py", ".yaml"))
