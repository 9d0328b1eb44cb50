"""The report as a page for a browser: one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtrrun.views.html.charts import charts
from dtrrun.views.html.holding import holding
from dtrrun.views.html.tables import tables

HERE = Path(__file__).parent
STYLES = ("vendor/uPlot.min.css", "report.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "charts.js", "report.js")
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def page(report: Mapping[str, Any], profile: Mapping[str, Any] | None = None) -> bytes:
    """Return the page of a report (see `build_report`), with the curve of `profile` (`dtrrun profile
    --json`).

    Text from the script is escaped. A report read from a file may have invalid values, which raise KeyError,
    TypeError, ValueError or AttributeError.
    """
    style = Markup("\n".join(map(_asset, STYLES)))
    scripts = [Markup(_asset(name)) for name in SCRIPTS]
    template = _environment().get_template("page.html")
    text = template.render(
        tables(report),
        holding=holding(report.get("holds")),  # missing in reports of older versions
        style=style,
        scripts=scripts,
        policy=_policy(style, scripts),
        data=_embedded(charts(report, profile or report.get("profile"))),
        licence=_asset("vendor/uPlot.LICENSE"),
    )
    return text.encode("utf-8", errors="replace")


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _policy(style: str, scripts: list[Markup]) -> str:
    """Return a content security policy that allows only our own styles and scripts, by digest."""
    ours = " ".join(_digest(script) for script in scripts)
    sources = f"default-src 'none'; style-src {_digest(style)}; script-src {ours}"
    return f"{sources}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(value: Any) -> Markup:
    """Return JSON for a script element: ASCII, and nothing that could end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.translate(ESCAPES))
