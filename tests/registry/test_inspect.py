"""``mmgraph inspect`` looks at every registered config without weights, and finds the tower."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmgraph.inspect import inspect_model
from mmgraph.inspect.source import resolve
from mmgraph.inspect.text import render
from tests.registry.build import config_of, is_absent
from tests.registry.entries.all import ENTRIES
from tests.registry.entry import Entry

TRANSFORMERS = [entry for entry in ENTRIES if entry.library == "transformers" and not entry.eager]
ONE_A_KIND = {entry.inputs.kind: entry for entry in reversed(TRANSFORMERS)}


def inspect(entry: Entry, folder: Path) -> None:
    if is_absent(entry):
        pytest.skip(f"{entry.library} has no {entry.model}")
    config_of(entry).save_pretrained(folder)
    inspection = inspect_model(resolve(str(folder)).build(), entry.name)
    assert inspection.towers, inspection.candidates
    text = render(inspection)
    assert all(view.class_name in text and view.why in text for view in inspection.towers)


@pytest.mark.parametrize("entry", ONE_A_KIND.values(), ids=lambda entry: entry.name)
def test_one_config_of_each_kind_can_be_inspected(entry: Entry, tmp_path: Path) -> None:
    inspect(entry, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("entry", TRANSFORMERS, ids=lambda entry: entry.name)
def test_every_config_can_be_inspected(entry: Entry, tmp_path: Path) -> None:
    inspect(entry, tmp_path)
