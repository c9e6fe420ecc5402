"""Every encoder in short: found from the whole model, attached, called, judged, detached.

python -m pytest tests/registry -m "not slow"       # CPU: trace, float32
python -m pytest tests/registry -m gpu              # CUDA: graphs, bfloat16
python -m pytest tests/registry -m "gpu and slow"   # the whole form there, see test_whole.py
"""

from __future__ import annotations

import pytest

from tests.registry.build import Absent, why_eager
from tests.registry.entries.all import ENTRIES
from tests.registry.entry import Entry
from tests.registry.examine import examine
from tests.registry.outcome import Outcome
from tests.registry.record import HOW_TO_RECORD, Recorder, documented, section_name
from tests.registry.subject import Subjects

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")  # WavLM
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # LASR
@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")  # Mllama, 5.17
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_encoder_is_served_as_in_eager_mode(
    entry: Entry, device: str, subjects: Subjects, recorder: Recorder
) -> None:
    outcome = Outcome(entry.modality, entry.inputs.kind)
    recorder.add(device, entry.name, outcome)
    try:
        examine(subjects.get(entry, device), outcome)
    except Absent as absent:
        outcome.graph = "absent"
        _compare_with_documents(entry, device, outcome, recorder)
        pytest.skip(str(absent))
    except Exception as error:
        outcome.problems.append(f"{type(error).__name__}: {error}"[:200])
        raise
    assert not outcome.problems
    assert (outcome.graph == "eager") == bool(why_eager(entry)), outcome.why
    _compare_with_documents(entry, device, outcome, recorder)


def _compare_with_documents(
    entry: Entry, device: str, outcome: Outcome, recorder: Recorder
) -> None:
    section = documented().get(section_name(device))
    if recorder.path is not None or section is None:
        return  # it is being recorded, or is a version or a GPU that nobody has recorded yet
    known = section["entries"].get(entry.name)
    assert known is not None, f"docs/models.json lacks it: {HOW_TO_RECORD}"
    assert outcome.graph == known["graph"], f"docs/models.json says otherwise: {HOW_TO_RECORD}"
