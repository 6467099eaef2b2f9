"""wgrad_into: exact accumulation in a buffer wider than the operands, whatever their layout; cases 9 to 11 and 16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_frozen import wgrad_into
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import LayoutError
from megatron_frozen.testing import relative_error

IN, OUT = 7, 5

# name -> (dY [..., OUT], X [..., IN]); both name the same tokens, in whatever memory
LAYOUTS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "matrix": lambda: (torch.randn(32, OUT), torch.randn(32, IN)),
    "one token": lambda: (torch.randn(OUT), torch.randn(IN)),
    "dense": lambda: (torch.randn(6, 3, OUT), torch.randn(6, 3, IN)),
    "gradient transposed": lambda: (torch.randn(3, 6, OUT).transpose(0, 1), torch.randn(6, 3, IN)),
    "input transposed": lambda: (torch.randn(6, 3, OUT), torch.randn(3, 6, IN).transpose(0, 1)),
    "both transposed": lambda: (torch.randn(3, 6, OUT).transpose(0, 1), torch.randn(3, 6, IN).transpose(0, 1)),
    "gradient of a sum": lambda: (torch.ones(()).expand(6, 3, OUT), torch.randn(6, 3, IN)),
    "gradient expanded": lambda: (torch.randn(6, 1, OUT).expand(6, 3, OUT), torch.randn(6, 3, IN)),
    "hidden dims strided": lambda: (torch.randn(6, 3, OUT, 2)[..., 0], torch.randn(6, 3, IN, 2)[..., 1]),
    "rank 4": lambda: (torch.randn(2, 6, 3, OUT).permute(1, 2, 0, 3), torch.randn(6, 3, 2, IN)),
    "no tokens": lambda: (torch.randn(0, 1, OUT), torch.randn(0, 1, IN)),
}


def reference(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.double().reshape(-1, OUT).t() @ x.double().reshape(-1, IN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_buffer_holds_the_unrounded_product(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad, x = (tensor.to(dtype) for tensor in LAYOUTS[name]())
    untouched = grad.clone(), x.clone()
    start = torch.randn(OUT, IN)
    added, overwritten = start.clone(), torch.full((OUT, IN), torch.nan)
    with Recorder() as seen:
        wgrad_into(added, grad, x, accumulate=True)
    wgrad_into(overwritten, grad, x, accumulate=False)
    assert seen.count("aten.addmm_") == (1 if grad.numel() else 0)
    assert seen.count("aten.bmm") == 0
    assert added.dtype == overwritten.dtype == torch.float32
    torch.testing.assert_close(added.double(), start.double() + reference(grad, x), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(overwritten.double(), reference(grad, x), rtol=1e-6, atol=1e-5)
    assert torch.equal(grad, untouched[0])
    assert torch.equal(x, untouched[1])


def test_bf16_rounding_would_have_failed() -> None:
    """Case 9, and its control: the bf16-rounded product is outside the tolerance that the buffer meets."""
    torch.manual_seed(0)
    x, grad = torch.randn(32, IN).bfloat16(), torch.randn(32, OUT).bfloat16()
    main_grad = torch.zeros(OUT, IN)
    wgrad_into(main_grad, grad, x, accumulate=True)
    assert relative_error(main_grad, reference(grad, x)) < 1e-5
    assert relative_error((grad.t() @ x).float(), reference(grad, x)) > 1e-4


def test_micro_batches_add_up_exactly_and_overwriting_forgets() -> None:
    """Cases 10 and 11: 256 + 1 = 257, which bf16 cannot hold; 7 + G1 + G2; then G1 alone."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    buffer = torch.zeros(1, 1)
    for value in (256, 1):
        wgrad_into(buffer, one * value, one, accumulate=True)
    assert buffer.item() == 257.0
    buffer.fill_(7)
    for value in (2, 3):
        wgrad_into(buffer, one * value, one, accumulate=True)
    assert buffer.item() == 12.0
    wgrad_into(buffer, one * 2, one, accumulate=False)
    assert buffer.item() == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_floating_buffers_work(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(32, IN).bfloat16(), torch.randn(32, OUT).bfloat16()
    buffer = torch.ones(OUT, IN, dtype=dtype)
    wgrad_into(buffer, grad, x, accumulate=True)
    assert buffer.dtype == dtype
    assert relative_error(buffer, 1 + reference(grad, x)) < (5e-3 if dtype == torch.bfloat16 else 1e-15)


def test_strided_buffers_and_autocast_and_grad_mode() -> None:
    """A buffer may be a column slice of a larger one; the product does not enter a graph, nor autocast's dtype."""
    torch.manual_seed(0)
    x, grad = torch.randn(6, 3, IN, requires_grad=True), torch.randn(6, 3, OUT)
    pool = torch.zeros(OUT, 2 * IN)
    with torch.autocast("cpu", torch.bfloat16):
        wgrad_into(pool[:, ::2], grad, x, accumulate=True)
    assert relative_error(pool[:, ::2], reference(grad, x.detach())) < 1e-6
    assert not pool[:, 1::2].any()
    assert not pool.requires_grad


@pytest.mark.parametrize(
    ("buffer", "shapes", "message"),
    [
        (torch.zeros(OUT, IN + 1), ((4, OUT), (4, IN)), r"main_grad has shape \[5, 8\] for a weight gradient"),
        (torch.zeros(IN, OUT), ((4, OUT), (4, IN)), r"main_grad has shape \[7, 5\] for a weight gradient of"),
        (torch.zeros(OUT, IN, dtype=torch.int32), ((4, OUT), (4, IN)), "main_grad has dtype torch.int32; give a"),
        (torch.zeros(OUT, IN), ((4, OUT), (3, IN)), r"a weight gradient was asked of leading dims \[4\] and \[3\]"),
        (torch.zeros(OUT, IN), ((2, 3, OUT), (6, IN)), r"asked of leading dims \[2, 3\] and \[6\]; give both operands"),
    ],
    ids=["columns", "transposed", "int", "token counts", "token shapes"],
)
def test_what_does_not_fit_is_refused_before_writing(
    buffer: torch.Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        wgrad_into(buffer, torch.ones(shapes[0]), torch.ones(shapes[1]), accumulate=True)
    assert not buffer.any()


def test_operands_of_two_dtypes_are_refused() -> None:
    buffer = torch.zeros(OUT, IN)
    with pytest.raises(LayoutError, match=r"operands of dtypes torch.bfloat16 and torch.float32; cast them to one"):
        wgrad_into(buffer, torch.ones(4, OUT, dtype=torch.bfloat16), torch.ones(4, IN), accumulate=True)
    assert not buffer.any()


@pytest.mark.parametrize("strides", [(0, 1), (100, 1), (1, 0), (1, 100), (0, 0)], ids=str)
def test_a_buffer_whose_elements_lie_on_one_another_is_refused(strides: tuple[int, int]) -> None:
    """A kernel that takes addresses would write past it."""
    memory = torch.zeros(256 * 300)
    buffer = memory.as_strided((300, 256), strides)
    operands = torch.ones(64, 300, dtype=torch.bfloat16), torch.ones(64, 256, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=r"an output \[300, 256\] with strides .* share memory; give one whose"):
        wgrad_into(buffer, *operands, accumulate=False)
    assert not memory.any()
