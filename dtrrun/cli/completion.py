"""Completes dtrrun's own words in a shell, and leaves the target's to the shell.

`dtrrun --show-completion SHELL` prints a function for the shell. At each Tab it calls dtrrun, with
_DTRRUN_COMPLETE set to the shell's name, and with the words up to the cursor, the last of which may be
incomplete. The first line of the answer is

- `target N`, if the Nth word begins the target: the shell completes as if the command line began there;
- else `words`, or `files` if files are meant as well.

The other lines are the words to choose from, with their meaning where the shell can show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dtrrun.cli.command import options_of
from dtrrun.cli.main import VERBS, split
from dtrrun.cli.profiles import names
from dtrrun.cli.run import SUMMARIES
from dtrrun.core.heuristics import AUTO, HEURISTIC_NAMES
from dtrrun.settings import Option

BASH = """\
_dtrrun() {
    local kind lines
    COMPREPLY=()
    mapfile -t lines < <(_DTRRUN_COMPLETE=bash "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    kind=${lines[0]-files}
    if [[ $kind != target* ]]; then
        COMPREPLY=("${lines[@]:1}")
    elif declare -F _command_offset >/dev/null; then
        _command_offset "${kind#target }"
        return
    fi
    if [[ $kind != words ]]; then
        compopt -o filenames
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$2")
    fi
}
complete -F _dtrrun dtrrun
"""

ZSH = """\
_dtrrun() {
    local kind
    local -a lines
    lines=("${(@f)$(_DTRRUN_COMPLETE=zsh ${words[1]} "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    kind=${lines[1]:-files}
    lines[1]=()
    if [[ $kind == target* ]]; then
        shift ${kind#target } words
        (( CURRENT -= ${kind#target } ))
        _normal
        return
    fi
    (( $#lines )) && _describe -V dtrrun lines
    [[ $kind == files ]] && _files
}
compdef _dtrrun dtrrun
"""

FISH = """\
function __dtrrun_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l lines (env _DTRRUN_COMPLETE=fish $before "$current" 2>/dev/null)
    if string match -q 'target *' -- $lines[1]
        set -l place (math (string replace 'target ' '' -- $lines[1]) + 1)
        complete -C "$(string join -- ' ' (string escape -- $before[$place..-1]) $current)"
        return
    end
    printf '%s\\n' $lines[2..-1]
    if test "$lines[1]" != words
        __fish_complete_path $current
    end
end
complete -c dtrrun -f -a '(__dtrrun_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
BREAKS = ("=", ":")

PLACES = ("PATH", "FOLDER", "LOG", "RUN")
"""Words in an option's placeholder that mean a file name."""

Words = Iterable[tuple[str, str]]
"""Words to choose from, and what each means."""


def answer(words: Sequence[str], shell: str) -> list[str]:
    """Return the lines for the words of a command line after `dtrrun`, up to the cursor."""
    places = list(range(1, len(words) + 1))
    if shell == "bash":
        words, places = _joined(words)
    *before, incomplete = words or [""]
    begun, files, found = complete(before, incomplete)
    if begun is not None:
        return [f"target {places[begun]}"]
    lines = (_line(word, what, incomplete, shell) for word, what in found if word.startswith(incomplete))
    return ["files" if files else "words", *lines]


def complete(before: Sequence[str], incomplete: str) -> tuple[int | None, bool, Words]:
    """Return what may follow the words `before`, in place of `incomplete`.

    If the target has begun, that is the index of its first word; else None, whether file names may follow,
    and which words.
    """
    verb, rest = "run", list(before)
    options, target = split(rest, verb)
    if target and target[0] in VERBS and rest[len(options)] != "--":
        verb, rest = target[0], target[1:]
        options, target = split(rest, verb)
    table = options_of(verb)
    if any(row.argument for row in table):  # its options may follow other words
        options, target = rest, []
    if target:
        python = target[0].startswith("-")  # -m, -c: nothing that a shell can complete
        return (None, True, []) if python else (len(before) - len(target), False, [])
    if len(options) < len(rest):  # after `--`
        return None, True, []
    named = {name: row for row in table if not row.argument for name in row.names}
    due = named.get(rest[-1]) if rest else None
    if due is not None and due.word:
        return None, *_values(due)
    name, equals, _ = incomplete.partition("=")
    if equals and name in named:
        files, found = _values(named[name])
        return None, files, [(f"{name}={word}", what) for word, what in found]
    if incomplete.startswith("-"):
        return None, False, [(name, _first(row.help)) for name, row in named.items()]
    verbs = [(name, SUMMARIES[name]) for name in VERBS] if len(rest) == len(before) else []
    return None, verb not in ("doctor", "top"), verbs


def _values(row: Option) -> tuple[bool, Words]:
    """Return whether an option takes a file name, and which words."""
    if row.key == "heuristic":
        return False, [(name, "") for name in (AUTO, *HEURISTIC_NAMES)]
    if row.key == "device":
        return False, [(name, "") for name in ("auto", "cpu", "cuda")]
    if row.key == "profile":
        return True, [(name, "") for name in names()]
    if row.word.islower():  # a choice, such as auto|off|require
        return False, [(name, "") for name in row.word.partition("[")[0].split("|")]
    return any(place in row.word for place in PLACES), []


def _first(help: str) -> str:
    """Return the first sentence of a help text, without markup."""
    return re.split(r"(?<=\w)[.:;] ", help)[0].removesuffix(".")


def _joined(words: Sequence[str]) -> tuple[list[str], list[int]]:
    """Join what bash splits at `=` and `:`. Returns the words, and the place of each in bash's list."""
    joined: list[str] = []
    places: list[int] = []
    for place, word in enumerate(words, start=1):
        if joined and (word in BREAKS or joined[-1].endswith(BREAKS)):
            joined[-1] += word
        else:
            joined.append(word)
            places.append(place)
    return joined, places


def _line(word: str, what: str, incomplete: str, shell: str) -> str:
    if shell == "bash":  # which replaces only what follows the last break
        cut = max(incomplete.rfind(mark) for mark in BREAKS) + 1
        return word[cut:]
    if shell == "zsh":
        word = word.replace(":", "\\:")
        return f"{word}:{what}" if what else word
    return f"{word}\t{what}"
