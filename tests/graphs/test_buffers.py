"""Static buffers: allocated once, prefix views of one arena, never rebound."""

from __future__ import annotations

import re

import pytest
import torch

from mmgraph import BufferSpec, ReplayError
from mmgraph.graphs import BufferArena, StaticBuffers

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_arena(device: str = "cpu") -> BufferArena:
    largest = {
        "patches": BufferSpec((8, 3), torch.float32),
        "lengths": BufferSpec((4,), torch.int32),
    }
    return BufferArena(largest, torch.device(device))


def patches(rows: int, width: int = 3, dtype: torch.dtype = torch.float32) -> BufferSpec:
    return BufferSpec((rows, width), dtype)


def test_every_view_starts_where_its_arena_does() -> None:
    arena = make_arena()
    for rows in (8, 2, 5):
        view = arena.views({"patches": patches(rows)}).views["patches"]
        assert view.shape == (rows, 3)
        assert view.data_ptr() == arena.storage["patches"].data_ptr()
        assert view.is_contiguous()


def test_num_bytes_is_the_size_of_the_storage() -> None:
    assert make_arena().num_bytes == 8 * 3 * 4 + 4 * 4


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("patches", patches(9)),  # more rows than the arena has
        ("patches", patches(8, width=2)),  # narrower rows
        ("patches", patches(2, width=4)),  # wider rows
        ("patches", patches(8, dtype=torch.float64)),  # another dtype
        ("patches", patches(8, dtype=torch.int32)),  # another dtype of the same size
        ("lengths", BufferSpec((4, 1), torch.int32)),  # another rank
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, spec: BufferSpec) -> None:
    arena = make_arena()
    held = arena.storage[name]
    message = (
        f"buffer {name!r} needs {spec.shape} of {spec.dtype}, but its arena holds "
        f"{tuple(held.shape)} of {held.dtype} and can't grow under live graphs"
    )
    with pytest.raises(ReplayError, match=f"^{re.escape(message)}$"):
        arena.views({name: spec})


def test_an_example_fills_its_view_and_nothing_beyond() -> None:
    arena = make_arena()
    arena.storage["patches"].fill_(-1)
    example = torch.arange(6.0).reshape(2, 3)
    views = arena.views({"patches": BufferSpec((2, 3), torch.float32, example)}).views
    assert torch.equal(views["patches"], example)
    assert (arena.storage["patches"][2:] == -1).all()


def test_without_an_example_floats_are_random_and_integers_zero() -> None:
    arena = make_arena()
    for storage in arena.storage.values():
        storage.fill_(7)
    views = arena.views({"patches": patches(8), "lengths": BufferSpec((4,), torch.int32)}).views
    assert len(views["patches"].unique()) == 24
    assert views["lengths"].tolist() == [0] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_filling_buffers_draws_no_random_number_of_the_user(device: str) -> None:
    def generator_state() -> torch.Tensor:
        return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()

    before = generator_state()
    make_arena(device).views({"patches": patches(8)})
    assert torch.equal(generator_state(), before)


def test_pieces_are_laid_end_to_end_and_the_rest_is_kept() -> None:
    arena = make_arena()
    buffers = arena.views({"patches": patches(6)})
    arena.storage["patches"].fill_(-1)
    one, two = torch.full((1, 3), 1.0), torch.full((3, 3), 2.0)
    buffers.load({"patches": [one, torch.empty(0, 3), two]})
    assert arena.storage["patches"][:, 0].tolist() == [1, 2, 2, 2, -1, -1, -1, -1]
    buffers.load({"patches": []})
    assert arena.storage["patches"][:, 0].tolist() == [1, 2, 2, 2, -1, -1, -1, -1]


def test_a_buffer_that_no_piece_names_is_an_error() -> None:
    """It would replay what another call left there."""
    arena = make_arena()
    buffers = arena.views({"patches": patches(2), "lengths": BufferSpec((2,), torch.int32)})
    with pytest.raises(ReplayError, match=r"reads \['lengths', 'patches'\], but got \['patches'\]"):
        buffers.load({"patches": [torch.ones(2, 3)]})


@pytest.mark.parametrize(
    "lengths",
    [
        (6,),  # at once
        (3, 2),  # in pieces
        (4, 1),  # a single row, which would broadcast to none
        (1, 4),  # the last piece is as long as the whole
    ],
)
def test_more_rows_than_the_buffer_has_are_an_error(lengths: tuple[int, ...]) -> None:
    buffers = make_arena().views({"patches": patches(4)})
    with pytest.raises(ReplayError, match="doesn't fit into the buffer 'patches'"):
        buffers.load({"patches": [torch.ones(n, 3) for n in lengths]})


def test_loading_never_moves_a_buffer() -> None:
    buffers = make_arena().views({"patches": patches(4)})
    buffers.load({"patches": [torch.ones(4, 3)]})
    buffers.check_addresses()


def test_a_rebound_buffer_is_found_and_named() -> None:
    buffers = make_arena().views({"patches": patches(4), "lengths": BufferSpec((2,), torch.int32)})
    buffers.check_addresses()
    before = buffers.views["lengths"].data_ptr()
    buffers.views["lengths"] = buffers.views["lengths"].clone()
    now = buffers.views["lengths"].data_ptr()
    message = f"the static buffer 'lengths' was captured at {before:#x} and is now at {now:#x}"
    with pytest.raises(ReplayError, match=message):
        buffers.check_addresses()


def test_a_regrown_buffer_is_found() -> None:
    buffers = StaticBuffers({"x": torch.zeros(4)})
    buffers.views["x"].resize_(1 << 16)
    with pytest.raises(ReplayError, match="must never be rebound or resized"):
        buffers.check_addresses()


def test_the_views_do_not_follow_the_mapping_they_were_made_from() -> None:
    views = {"x": torch.zeros(4)}
    buffers = StaticBuffers(views)
    views["x"] = torch.zeros(4)
    buffers.check_addresses()


@pytest.mark.parametrize("writer", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("device", DEVICES)
def test_buffers_made_in_inference_mode_are_written_in_every_mode(
    device: str, writer: type
) -> None:
    with torch.inference_mode():
        buffers = make_arena(device).views({"patches": patches(4)})
    assert not any(view.is_inference() for view in buffers.views.values())
    with writer():
        buffers.load({"patches": [torch.ones(4, 3, device=device)]})
    assert (buffers.views["patches"] == 1).all()
