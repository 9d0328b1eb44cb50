"""The pages of docs/: links resolve, commands parse, every option is described; see docs/site."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from dtrrun.cli.command import options_of
from dtrrun.cli.main import VERBS, parse, understand
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import RuntimeSettings, rows

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))

import links  # noqa: E402 - the site's own, which is no package
import options  # noqa: E402

PAGES = sorted({*links.pages(), "README.md", "CONTRIBUTING.md"})
DESCRIBED = {"run": "guide", "record": "guide", "top": "guide", "smoke": "ci", "simulate": "simulator"}
DESCRIBED |= {"peak": "howto/what-holds-the-peak"}
"""Where the verb's options are described; otherwise, in a page of the verb's name."""

CODE = re.compile(r"^( *)(```+|~~~+)(\S*).*?\n(.*?)^\1\2\s*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n[ \t]*\n)((?:(?: {4}|\t).*(?:\n|\Z)|[ \t]*\n)+)")
INLINE = re.compile(r"`(dtrrun [^`]+)`")
BEFORE = re.compile(r"^\s*(?:- run: |- |# \S+: )?(?:[A-Z_]+=\S+ )*(?=dtrrun )")
PLACEHOLDERS = ("…", "...", "[", "NAME", "VERB", "PATH")
"""Texts that mark a command line as a pattern."""


def text(page):
    return (ROOT / page).read_text()


def commands(markdown):
    """Yield the dtrrun command lines that a reader could copy."""
    markdown = markdown.replace("\\\n", " ")
    for match in CODE.finditer(markdown):
        lines = match[4].splitlines()
        prompted = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
        yield from (found for line in prompted or lines if (found := command_in(line)))
    rest = CODE.sub("\n", markdown)
    for match in INDENTED.finditer(rest):
        yield from (found for line in match[1].splitlines() if (found := command_in(line)))
    yield from (match[1] for match in INLINE.finditer(rest.replace("\n", " ")))


def command_in(line):
    found = BEFORE.match(line)
    return line[found.end() :] if found else None


def check(line):
    """Raise LaunchError or ValueError where `dtrrun` would not understand its own options in `line`."""
    verb, ours, _ = understand(shlex.split(line, comments=True)[1:])
    typed = parse(verb, [word for word in ours if word not in ("-h", "--help", "--version")])
    for row in options_of(verb):
        value = typed[row.key]
        if isinstance(value, str) and not value.isupper() and value != row.word:
            row.read(value)


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page):
    for path, anchor in links.links(text(page), page):
        assert (ROOT / path).exists(), f"{page}: {path}"
        if anchor and path.endswith(".md"):
            assert anchor[1:] in anchors(text(path)), f"{page}: {path}{anchor}"


def anchors(markdown):
    """Return the headings' anchors, as code hosts and mkdocs both make them from plain words."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    for line in commands(text(page)):
        if any(pattern in line for pattern in PLACEHOLDERS):
            continue
        try:
            check(line)
        except (LaunchError, ValueError) as error:
            pytest.fail(f"{page}: {line}: {error}")


def test_commands_are_found_and_mistakes_seen():
    found = [line for page in PAGES for line in commands(text(page))]
    assert len(found) > 60
    assert {line.split()[1] for line in found} >= {"record", "simulate", "smoke", "top", "doctor"}
    for wrong in ("dtrrun --bugdet 6GB train.py", "dtrrun smoke --step 3 train.py", "dtrrun record -o"):
        with pytest.raises(LaunchError):
            check(wrong)
    with pytest.raises(ValueError, match="sometimes"):
        check("dtrrun --live sometimes train.py")
    assert [
        *commands("a\n\n    X=1 dtrrun top\n\n```console\n$ dtrrun a.py\ndtrrun b\n```\n`dtrrun\nsmoke`\n")
    ] == [
        "dtrrun a.py",
        "dtrrun top",
        "dtrrun smoke",
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_described(verb):
    page = text(f"docs/{DESCRIBED.get(verb, verb)}.md")
    missing = [row.names[0] for row in described(verb) if not any(named(name, page) for name in row.names)]
    assert not missing, f"not in docs/{DESCRIBED.get(verb, verb)}.md: {missing}"


def described(verb):
    return [row for row in options_of(verb) if row.key != "version" and not row.argument]


def named(name, page):
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", page)


def test_the_reference_has_every_verb_and_option():
    made = options.commands()
    for verb in VERBS:
        part = made[made.index(f"## `dtrrun {verb}`") :].split("\n## ")[0]
        assert all(f"`{name}" in part for row in described(verb) for name in row.names), verb
    assert "[bold]" not in made


def test_the_reference_has_every_keyword_of_a_budget_in_ones_own_code():
    made = options.keywords()
    assert all(f"| `{row.field}` |" in made for row in rows(RuntimeSettings)[2:])


def test_every_page_has_a_place_on_the_site():
    def places(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            one for below in (entry.values() if isinstance(entry, dict) else entry) for one in places(below)
        ]

    nav = [links.origin_of(place) for place in places(yaml.safe_load(text("mkdocs.yml"))["nav"])]
    assert sorted(nav) == sorted(links.pages())


def test_every_line_of_the_final_table_is_described():
    source = (ROOT / "dtrrun" / "views" / "final.py").read_text()
    labels = {*re.findall(r'rows\["([^"]+)"\]', source), "slowdown", "in all"}
    described = re.findall(r"^\| `([^`]+)` \|", text("docs/howto/read-the-report.md"), re.MULTILINE)
    assert sorted(described) == sorted({*labels, "peak"})


def test_sections_of_the_measurements_are_numbered_and_exist():
    numbers = [
        int(number) for number in re.findall(r"^## (\d+)\.", text("docs/measurements.md"), re.MULTILINE)
    ]
    assert numbers == [*range(1, len(numbers) + 1)]
    for page in PAGES:
        for number in re.findall(r"[Ss]ection (\d+)\b", text(page)):
            assert int(number) in numbers, f"{page}: section {number}"


def test_nobody_is_told_to_install_what_is_not_on_an_index():
    """Until the name is ours (release/README.md), anybody could upload a package under it."""
    sources = [ROOT / page for page in PAGES] + [*(ROOT / "dtrrun").rglob("*.py")]
    by_name = re.compile(r"\b(?:pip|pipx|uv tool|uv) (?:install|add|download)\b[^`\n]* '?dtrrun(?![\w-])")
    found = {str(path): by_name.findall(path.read_text()) for path in sources}
    found = {path: lines for path, lines in found.items() if lines}
    warned = "pip install dtrrun"  # the page that tells not to
    assert found == {str(ROOT / "docs/ci.md"): [warned]}
    assert all(
        by_name.search(f"    {wrong}")
        for wrong in ("pip install -r a.txt dtrrun", "pip install 'dtrrun[torch]'")
    )
    assert not by_name.search("pip install vendor/dtrrun-*.whl")


def test_links_on_the_site():
    assert links.on_site("[a](../guide.md#x) [b](../../dtrrun/cli)", "docs/design/overview.md") == (
        "[a](../guide.md#x) [b](../source/dtrrun/cli.md)"
    )
    assert (
        links.on_site("[a](docs/ci.md) [b](https://a.b/c.md)", "CHANGELOG.md")
        == "[a](../ci.md) [b](https://a.b/c.md)"
    )
    assert links.on_site("![a](pictures/a.svg) [b](#c)", "docs/ci.md") == "![a](pictures/a.svg) [b](#c)"
    assert links.on_site("```\na[0](x.py)\n```\n[a](x.py)", "docs/ci.md") == (
        "```\na[0](x.py)\n```\n[a](source/docs/x.py.md)"
    )
    assert "dtrrun/cli/main.py" in links.sources()


def test_names_are_in_the_files_that_are_named_beside_them():
    """`name` (`file.h`), and `name` in `file.h`."""
    files = [path for folder in ("dtrrun", "tests") for path in (ROOT / folder).rglob("*.*")]
    beside = re.compile(r"`(?:\w+(?:::|\.))*(\w+)`\s+(?:\(|in\s+)\[?`([\w/]+\.(?:h|cpp|py))`")
    pairs = [(page, *pair) for page in PAGES for pair in beside.findall(text(page))]
    assert len(pairs) > 30
    for page, name, file in pairs:
        found = [path for path in files if path.as_posix().endswith(f"/{file}")]
        found += [path.with_suffix(".cpp") for path in found if path.with_suffix(".cpp") in files]
        code = "".join(path.read_text() for path in found)
        assert not found or re.search(rf"\b{name}\b", code), f"{page}: {name} in {file}"


NUMBERS = (
    ("native.md", r"types are those of (\d+) operators", "native/typed_kernels.h", r"\bops::(?=\w+[,>(])"),
    ("native.md", r"a kernel runs that takes more than (\d+) µs", "native/replays.h", "BRIEF_NS"),
    ("overview.md", r"known to take less than (\d+) µs", "native/replays.h", "BRIEF_NS"),
    ("native.md", r"at most a (\d+)th of the budget together", "native/interposer.h", "LITTLE"),
    ("native.md", r"more than one in (\d+) evictions", "native/interposer.h", "FEW"),
    ("native.md", r"less than a (\d+)th of the budget was left", "native/interposer.h", "SPARE"),
    ("native.md", r"every ([\d,]+) operators, are native", "runtime/session.py", "COMPACT_EVERY"),
    ("native.md", r"the (\d+) most recently used ones stay", "runtime/access.py", "RECENT"),
    ("native.md", r"blocks of (\d+) KiB and more come", "native/heap.h", "LARGE"),
    ("native.md", r"the first (\d+) sizes and each", "native/measuring.h", "LOOKED_AT"),
    ("cuda.md", r"at most (three) times", "runtime/cuda/oom_retry.py", "ATTEMPTS"),
    ("cuda.md", r"for every (\d+) blocks that there are", "native/windows.h", "BLOCKS_EACH"),
    ("cuda.md", r"After a step with (\d+) searches", "runtime/cuda/budget.py", "MANY_SEARCHES"),
    ("cuda.md", r"for the next (\d+)\s+steps", "runtime/cuda/budget.py", "FORGET_SEARCHES"),
)
"""Numbers in pages of the design, each with the constant that it is, or with what it counts."""


@pytest.mark.parametrize(("page", "said", "file", "what"), NUMBERS)
def test_numbers_of_the_design_are_those_of_the_code(page, said, file, what):
    pattern = said.replace(" ", r"\s+")
    [found] = re.findall(pattern, text(f"docs/design/{page}"))
    source = (ROOT / "dtrrun" / file).read_text()
    if what.isupper():
        values = re.findall(rf"\b{what}\b = \(?(?:size_t\{{)?([\d_']+)", source)
        assert values, f"{file}: {what}"
        counted = int(re.sub(r"[_']", "", values[0])) // (1000 if "µs" in said else 1)
    else:
        counted = len(re.findall(what, source))
    assert {"three": 3}.get(found) or int(found.replace(",", "")) == counted, f"{page}: {found}, {counted}"


def test_names_of_the_code_exist():
    """`Class.name` and `Class::name` in pages: the file of the class has the name."""
    sources = {
        path: path.read_text() for end in ("py", "h", "cpp") for path in (ROOT / "dtrrun").rglob(f"*.{end}")
    }
    classes: dict[str, str] = {}
    for path, text in sources.items():
        for name in re.findall(r"^ *(?:class|struct) (\w+)", text, re.MULTILINE):
            classes[name] = classes.get(name, "") + text + sources.get(path.with_suffix(".cpp"), "")
    unknown = {
        f"{page}: {one}.{name}"
        for page in PAGES
        for one, name in re.findall(r"`(\w+)(?:::|\.)(\w+)(?:\(\))?`", (ROOT / page).read_text())
        if one in classes and not re.search(rf"\b{name}\b", classes[one])
    }
    assert unknown <= {"docs/limits.md: Library.impl"}  # PyTorch's
