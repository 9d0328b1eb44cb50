"""What mkdocs is told beside mkdocs.yml: pages for files outside of docs/, and the commands' options."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import links
import options
from mkdocs.structure.files import File, Files

TABLES = {"<!-- commands -->": options.commands, "<!-- keywords -->": options.keywords}
BAR = r"\|"
BARS = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".log": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file of the repository that a page links to: the site leads nowhere else."""
    for path in links.sources():
        files.append(File.generated(config, links.page_of(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    for mark, made in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    markdown = links.on_site(markdown, links.origin_of(page.file.src_uri))
    return ROW.sub(lambda row: BARS.sub(_bars, row[0]), markdown)


def _bars(code: re.Match[str]) -> str:
    """A bar in the code of a table, which Markdown by Python shows with the backslash that it has to have."""
    return f"<code>{escape(code[1]).replace(BAR, '&#124;')}</code>"


def _source(path: str) -> str:
    file = links.ROOT / path
    if path.endswith(".md"):
        return file.read_text()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if file.is_dir():
        return head + "\n".join(f"- [`{name}`]({file.name}/{name})" for name in links.files_in(path)) + "\n"
    language = LANGUAGES.get(file.suffix, "text")
    return f"{head}``````{language}\n{file.read_text()}\n``````\n"
