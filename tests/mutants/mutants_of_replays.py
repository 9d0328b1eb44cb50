"""The accounts, and what keeps rematerialization right and cheap."""

from __future__ import annotations

from mutant import nothing, row

# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "accounting",
    ("a storage that grew counts as before", "core.ledger:Ledger.resized", nothing,
     "hazards_constants::storages_that_grow_and_shrink_are_counted"),
)
