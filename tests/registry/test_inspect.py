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
from tests.registry.record import documented, section_name

FORECAST_IS_OFF = {
    "inkling2",
    "inkling2_loop",
    "nemotron_asr_streaming_encoder",
    "phi4_multimodal",
    "qwen3_asr",
    "qwen3_omni_moe",
    "step3p7",
    "xclip",
}
"""What values decide, arguments and shapes don't tell; ``--try`` does."""
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
    seen = documented().get(section_name("cpu"), {}).get("entries", {}).get(entry.name)
    if seen is not None and entry.name not in FORECAST_IS_OFF:
        views = [v for v in inspection.towers if v.class_name == seen["class_name"]]
        assert {view.capture for view in views} == {seen["graph"]}


@pytest.mark.parametrize("entry", ONE_A_KIND.values(), ids=lambda entry: entry.name)
def test_one_config_of_each_kind_can_be_inspected(entry: Entry, tmp_path: Path) -> None:
    inspect(entry, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("entry", TRANSFORMERS, ids=lambda entry: entry.name)
def test_every_config_can_be_inspected(entry: Entry, tmp_path: Path) -> None:
    inspect(entry, tmp_path)
