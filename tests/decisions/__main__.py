"""Freezes decisions.

    python -m tests.decisions                  freeze all: half an hour of one processor
    python -m tests.decisions amp 17           freeze an example and a block of programs again
    python -m tests.decisions missing          freeze what the file lacks

Freeze before a change that must not change decisions, and run `make conformance` after it.
"""

from __future__ import annotations

import sys

from tests.decisions import frozen, runs


def main(words: list[str]) -> None:
    """Write the named entries, or all."""
    everything = [*runs.SIZES, *map(str, range(runs.BLOCKS))]
    found = frozen.read() if frozen.PATH.exists() else {"examples": {}, "programs": {}}
    if words == ["missing"]:
        words = [word for word in everything if word not in found["examples"] | found["programs"]]
    if unknown := [word for word in words if word not in everything]:
        sys.exit(f"neither an example nor a block of programs (0 to {runs.BLOCKS - 1}): {', '.join(unknown)}")
    if found.get("torch", frozen.version()) != frozen.version() and words:
        sys.exit(f"{frozen.PATH} is of PyTorch {found['torch']}, this is {frozen.version()}: freeze all")
    found["torch"] = frozen.version()
    for word in words or everything:
        print(word, flush=True)
        if word.isdecimal():
            found["programs"][word] = frozen.block(int(word))
        else:
            found["examples"][word] = frozen.example(word)
        frozen.write(found)


if __name__ == "__main__":
    main(sys.argv[1:])
