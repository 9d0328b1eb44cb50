"""The checks as JUnit XML, for CI servers."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from dtrrun.smoke.checks import Check


def junit(target: str, checks: Sequence[Check], tail: str) -> bytes:
    """Return a document with one test suite. tail: the end of the failed run's output."""
    failures = sum(check.passed is False for check in checks)
    skipped = sum(check.passed is None for check in checks)
    suite = ElementTree.Element(
        "testsuite",
        name="dtrrun smoke",
        tests=str(len(checks)),
        failures=str(failures),
        errors="0",
        skipped=str(skipped),
        time=f"{sum(check.seconds for check in checks):.3f}",
    )
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_valid(target), name=check.name, time=f"{check.seconds:.3f}"
        )
        if check.passed is None:
            ElementTree.SubElement(case, "skipped", message=_valid(check.detail))
        elif not check.passed:
            failure = ElementTree.SubElement(case, "failure", message=_valid(check.detail))
            failure.text = _valid(tail)
        else:
            ElementTree.SubElement(case, "system-out").text = _valid(check.detail)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _valid(text: str) -> str:
    """Remove characters that XML 1.0 cannot represent."""
    return "".join(
        c if c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "\ufffd"
        for c in text
    )
