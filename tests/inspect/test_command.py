"""The command, and running towers with ``--try``."""

from __future__ import annotations

import json

import pytest

from mmgraph import cli
from mmgraph.inspect import command
from mmgraph.inspect.source import resolve
from mmgraph.inspect.trial import CallResult, Trial, try_towers


def test_it_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "qwen2_5_vl:tiny"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen2_5_vl:tiny (a recipe): Qwen2_5_VLForConditionalGeneration")
    assert "model.visual: Qwen2_5_VisionTransformerPretrainedModel" in out
    assert "called as forward(hidden_states, grid_thw)" in out
    assert "16384 tokens" in out
    assert "a forecast, from arguments and shapes alone: --try runs the towers" in out


def test_it_prints_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "vit:tiny", "--json", "--try", "--dtype", "fp32"]) == 0
    data = json.loads(capsys.readouterr().out)
    (tower,) = data["towers"]
    assert (tower["class_name"], tower["dtype"]) == ("ViTModel", "float32")
    assert [b["tokens"] for b in tower["budgets"]] == [16, 32, 64, 128, 256, 512]
    (trial,) = data["trials"]
    assert [call["served"] for call in trial["calls"]] == ["budget"] * 3


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "bert"]) == 1
    assert "no tower found" in capsys.readouterr().out
    assert cli.main(["inspect", "whisperr:tiny"]) == 2
    assert "did you mean 'whisper:tiny'" in capsys.readouterr().err


def test_a_trial_that_differs_from_eager_mode_is_shouted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Trial("it", "tiny", (CallResult("budget", None, 0.5),))
    monkeypatch.setattr(command, "try_towers", lambda *_: (wrong,))
    assert cli.main(["inspect", "vit:tiny", "--try"]) == 1
    assert "DIFFERS FROM EAGER by 5.0e-01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("qwen2_5_vl:tiny", ["budget"] * 3),
        ("mistral3:tiny", ["eager", "exact", "exact"]),
        ("gemma4:tiny", ["eager", "exact", "exact"]),
        ("qwen3_asr:tiny", ["eager", "exact", "exact"]),
    ],
)
def test_a_recipe_is_tried_as_its_tiny_model(name: str, served: list[str]) -> None:
    source = resolve(name)
    (trial,) = try_towers(source, source.build())
    assert trial.what == name
    assert [call.served for call in trial.calls] == served
    assert trial.ok
    assert trial.replayed
    assert all(call.reason for call in trial.calls if call.served == "eager")


def test_a_timm_model_is_tried_through_each_method() -> None:
    source = resolve("test_vit")  # timm's own tiny model
    trials = try_towers(source, source.build())
    assert [t.tower for t in trials] == ["VisionTransformer", "VisionTransformer.forward_features"]
    assert all(t.ok and t.replayed for t in trials)


def test_a_large_tower_is_not_built() -> None:
    source = resolve("clip")
    (trial,) = try_towers(source, source.build())
    assert trial.calls == ()
    assert trial.not_run is not None
    assert "below 50 M" in trial.not_run


def test_a_tower_without_an_example_says_so() -> None:
    source = resolve("moonshine_streaming_encoder")
    (trial,) = try_towers(source, source.build())
    assert trial.not_run is not None
    assert "can't be read off its config" in trial.not_run


@pytest.mark.parametrize(("error", "equal"), [(0.0, True), (1e-3, False), (float("nan"), False)])
def test_equal_means_up_to_rounding(error: float, equal: bool) -> None:
    assert CallResult("exact", None, error).equal is equal
