from __future__ import annotations

import pytest

from mmgraph.bench.sizes import ImageSize, parse_image


@pytest.mark.parametrize(
    ("text", "expected"),
    [("448", ImageSize(448)), ("448x4", ImageSize(448, 4)), ("28x1", ImageSize(28))],
)
def test_an_image_size_is_read(text: str, expected: ImageSize) -> None:
    assert parse_image(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "448x", "x4", "448x0", "448x4x2", "-448", "4.5", "448*4"]
)
def test_what_is_no_image_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SIZExCOUNT"):
        parse_image(text)


@pytest.mark.parametrize("text", ["448", "448x16"])
def test_an_image_size_reads_as_it_was_given(text: str) -> None:
    assert str(parse_image(text)) == text


@pytest.mark.parametrize(
    ("side", "patch", "grid"),
    [
        (448, 14, (1, 32, 32)),
        (784, 16, (1, 48, 48)),  # 49 patches a side are no whole merge groups
        (8, 14, (1, 2, 2)),  # never less than one
    ],
)
def test_a_grid_holds_whole_merge_groups(side: int, patch: int, grid: tuple[int, ...]) -> None:
    assert ImageSize(side).grid(patch, 2) == grid
