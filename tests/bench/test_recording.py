"""What is recorded of a call is what the tower computes: counted by hand, and by PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmgraph.bench.bound import workload_of
from mmgraph.bench.recording import record
from mmgraph.bench.sizes import ImageSize
from mmgraph.bench.subject import open_subject
from mmgraph.bench.workload import Attention, Matmul, Product, Workload
from mmgraph.recipes import load_recipe

CPU = torch.device("cpu")
BATCH, SIDE, PATCH, WIDTH, HEADS = 3, 8, 4, 16, 2


class _Tower(nn.Module):
    """Patches, one attention, a pooling head: everything that is recorded, once."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.pool = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x_BLD = self.patches(pixels).flatten(2).transpose(1, 2)
        x_BLD = self.depthwise(x_BLD.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x_BLD).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended_BHLK = F.scaled_dot_product_attention(q, k, v)
        y_BLD = attended_BHLK.transpose(1, 2).flatten(2)
        similar_BLL = y_BLD @ y_BLD.transpose(1, 2)
        pooled: torch.Tensor = self.pool(similar_BLL @ y_BLD, y_BLD, y_BLD)[0][:, 0]
        return pooled


@pytest.fixture
def recorded() -> Workload:
    tower = _Tower().eval()
    with torch.no_grad():
        return record(lambda: tower(torch.randn(BATCH, 3, SIDE, SIDE)))


def test_each_product_is_recorded_with_its_rows_and_its_own_weight(recorded: Workload) -> None:
    length = (SIDE // PATCH) ** 2
    rows = BATCH * length
    weights = [op for op in recorded.products if isinstance(op, Product)]
    assert [(op.rows, *(tuple(w.shape) for w in op.weights)) for op in weights] == [
        (
            rows,
            (WIDTH, 3 * PATCH * PATCH),
        ),  # a patch is a row; the depthwise convolution isn't here
        (rows, (3 * WIDTH, WIDTH)),
        *[(rows, (WIDTH, WIDTH))] * 4,  # of the pooling head: queries, keys, values, output
    ]
    matmuls = [op for op in recorded.products if isinstance(op, Matmul)]
    assert [(op.left, op.right) for op in matmuls] == [
        ((BATCH, length, WIDTH), (BATCH, WIDTH, length)),
        ((BATCH, length, length), (BATCH, length, WIDTH)),
    ]


def test_operations_are_counted_as_by_hand(recorded: Workload) -> None:
    length = (SIDE // PATCH) ** 2
    rows = BATCH * length
    attention = 2 * (4 * BATCH * length**2 * WIDTH)  # two of them, heads x head width = WIDTH
    assert sum(op.flops for op in recorded.attention) == attention
    products = 2 * rows * (3 * PATCH**2 * WIDTH + 3 * WIDTH**2 + 4 * WIDTH**2)
    products += 2 * BATCH * 2 * length * length * WIDTH
    assert sum(op.flops for op in recorded.products) == products


def test_recording_changes_nothing() -> None:
    tower, pixels = _Tower().eval(), torch.randn(BATCH, 3, SIDE, SIDE)
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        record(lambda: outputs.append(tower(pixels)))
        outputs.append(tower(pixels))
    torch.testing.assert_close(*outputs)


def test_attention_right_after_attention_is_more_segments() -> None:
    q, longer = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)

    def call() -> None:
        for x in (q, longer, q):
            F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.linear(q, torch.randn(8, 8))
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool))

    joined, causal, _, masked = record(call).operations
    assert isinstance(joined, Attention)
    assert (joined.queries, joined.keys) == ((5, 7, 5), (5, 7, 5))
    assert joined.flops == 4 * (25 + 49 + 25) * 2 * 8
    assert isinstance(causal, Attention)
    assert causal.causal
    assert isinstance(masked, Attention)
    assert masked.mask == ((5, 5), torch.bool)


def test_layers_that_take_the_same_input_are_one_product() -> None:
    x, other = torch.randn(5, 8), torch.randn(5, 8)
    q, k, v = (torch.randn(8, 8) for _ in range(3))

    def call() -> None:
        for tensor, weight in ((x, q), (x, k), (other, v), (x, q)):
            F.linear(tensor, weight)

    both, third, last = record(call).operations
    assert isinstance(both, Product)
    assert [w.data_ptr() for w in both.weights] == [q.data_ptr(), k.data_ptr()]
    assert both.flops == 2 * 5 * (2 * 64)
    for op in (third, last):
        assert isinstance(op, Product)
        assert len(op.weights) == 1


def test_heads_that_share_keys_count_by_the_queries() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8)
    (attention,) = record(
        lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    ).attention
    assert (attention.heads, attention.key_heads) == (4, 2)
    assert attention.flops == 4 * (2 * 5 * 6) * 4 * 8


@pytest.mark.parametrize(
    "name",
    ["clip:tiny", "siglip:tiny", "timm:tiny", "whisper:tiny", "qwen2_5_vl:tiny", "mistral3:tiny"],
)
def test_a_tower_has_as_many_operations_as_pytorch_counts(name: str) -> None:
    """Of padded metadata, of windows, and of a call that no layout holds."""
    with torch.no_grad(), open_subject(load_recipe(name), CPU, torch.float32) as subject:
        size = subject.sizes([ImageSize(112, 3)], [3])[0]
        inputs = subject.inputs(size)
        workload = workload_of(subject, size, inputs)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            inputs.call_eager(subject.tower)
    assert sum(op.flops for op in workload.operations) == counter.get_total_flops()


def test_windows_and_whole_images_are_told_apart() -> None:
    recipe = load_recipe("qwen2_5_vl:tiny")
    with torch.no_grad(), open_subject(recipe, CPU, torch.float32) as subject:
        size = subject.sizes([ImageSize(112, 2)], [])[0]
        workload = workload_of(subject, size, subject.inputs(size))
    windows, whole = (16,) * 8, (64,) * 2
    assert [op.queries for op in workload.attention] == [windows, whole, windows, whole]
