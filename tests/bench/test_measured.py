from __future__ import annotations

import torch

from mmgraph.bench.accuracy import output_error
from mmgraph.bench.measured import JUDGED, measure_variants
from mmgraph.bench.names import BOUND, EAGER, EXACT
from mmgraph.bench.subject import Inputs


def test_outputs_are_for_contents_that_no_timed_call_has_seen() -> None:
    inputs = Inputs(torch.zeros(3, 4), {}, {})
    seen: list[torch.Tensor] = []

    def double() -> torch.Tensor:
        seen.append(inputs.main.clone())
        return inputs.main * 2

    measured = measure_variants({EAGER: double}, inputs, 3, repeats=2, warmup=1)
    *timed, judged = seen
    assert all(torch.equal(timed[0], other) for other in timed)
    assert not torch.equal(timed[0], judged)
    assert torch.equal(measured.outputs[EAGER][0], judged * 2)
    inputs.renew(0)
    inputs.renew(JUDGED)
    assert torch.equal(inputs.main, judged)  # so another set of variants can be given the same


def test_a_replay_that_overwrites_its_output_and_one_that_is_stale_are_told_apart() -> None:
    inputs, static = Inputs(torch.zeros(3, 4), {}, {}), torch.zeros(3, 4)
    stale = torch.ones(3, 4)
    calls = {EAGER: lambda: static.copy_(inputs.main), EXACT: lambda: stale}
    outputs = measure_variants(calls, inputs, 3, repeats=1, warmup=0).outputs
    static.zero_()
    assert output_error(outputs[EAGER], inputs.main) == 0
    assert output_error(outputs[EXACT], outputs[EAGER]) > 0.1


def test_the_bound_is_timed_and_has_no_output() -> None:
    inputs = Inputs(torch.zeros(3, 4), {}, {})
    measured = measure_variants({BOUND: lambda: None}, inputs, 3, repeats=4, warmup=0)
    assert measured.timings[BOUND].n == measured.throughput[BOUND].n == 4
    assert measured.throughput[BOUND].items_per_s == 3 * measured.throughput[BOUND].calls_per_s
    assert measured.outputs == {}


def test_measurements_can_be_put_together() -> None:
    inputs = Inputs(torch.zeros(3, 4), {}, {})
    first, second = (
        measure_variants({name: inputs.main.clone}, inputs, 3, repeats=1, warmup=0)
        for name in (EAGER, EXACT)
    )
    both = first | second
    assert list(both.timings) == list(both.throughput) == list(both.outputs) == [EAGER, EXACT]
