"""Every entry; those that share a model stand together, so that it is built once."""

from __future__ import annotations

from tests.registry.build import identity
from tests.registry.entries import (
    alone,
    images,
    mel,
    packed,
    padded,
    speech,
    tiles,
    timm_models,
)
from tests.registry.entry import Entry

__all__ = ["ENTRIES"]


def _together(entries: list[Entry]) -> list[Entry]:
    first: dict[str, int] = {}
    for place, entry in enumerate(entries):
        first.setdefault(identity(entry), place)
    return sorted(entries, key=lambda entry: first[identity(entry)])


_GROUPS = (packed, padded, images, tiles, alone, mel, speech, timm_models)
ENTRIES = _together([entry for group in _GROUPS for entry in group.ENTRIES])
assert len({entry.name for entry in ENTRIES}) == len(ENTRIES), "names are unique"
