"""Threads that share a manager get their own results."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.manager.engine import call_of, make_manager, tiny_encoder


def test_threads_get_their_own_results() -> None:
    manager = make_manager(max_graphs=3)  # so that calls also capture and fall back at once
    encoder: Any = manager.model
    sizes = [[4], [8, 2], [30], [34, 4], [2] * 7, [16, 16]]
    calls = [[call_of(s, seed=10 * t + i) for i, s in enumerate(sizes)] for t in range(2)]
    expected = [[encoder.embed_multimodal(**call) for call in part] for part in calls]
    start, failures = threading.Barrier(2), list[str]()

    def work(thread: int) -> None:
        start.wait()
        for _ in range(5):
            for call, items in zip(calls[thread], expected[thread], strict=True):
                try:
                    for output, item in zip(manager.execute(call), items, strict=True):
                        torch.testing.assert_close(output, item, rtol=1e-5, atol=1e-5)
                except Exception as error:
                    failures.append(f"{call['lengths'].tolist()}: {error}")

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = manager.stats()
    assert stats.calls == 2 * 5 * len(sizes)
    assert stats.items == 2 * 5 * sum(map(len, sizes))


def test_threads_that_run_a_tower_get_their_own_results() -> None:
    encoder = tiny_encoder("qwen2_vl:tiny")
    manager = make_manager(encoder, token_budgets=(64, 256))
    calls = [encoder.example_call() for _ in range(4)]
    with torch.no_grad():
        expected = [encoder.embed_multimodal(**call).pooler_output for call in calls]
    failures, start = list[str](), threading.Barrier(2)

    @torch.no_grad()
    def work(thread: int) -> None:
        start.wait()
        for i in (thread, thread + 2) * 5:
            output = manager.run(calls[i]).pooler_output
            if not torch.allclose(output, expected[i], rtol=1e-4, atol=1e-4):
                failures.append(f"call {i}")

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.stats().hits == 20
