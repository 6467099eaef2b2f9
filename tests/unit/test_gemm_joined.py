"""Products over weights in parts: views and concatenations counted, operators checked, nothing held."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from megatron_frozen import gemm
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.functional import linear_with_split_parameters
from megatron_frozen.gemm import joined
from megatron_frozen.storage import split_rows

SIZES = [3, 4, 5]


def parts_of(full: Tensor, *, adjacent: bool) -> list[Tensor]:
    return split_rows(full.clone(), SIZES) if adjacent else [part.clone() for part in full.split(SIZES)]


@pytest.mark.parametrize("adjacent", [True, False])
def test_one_concatenation_serves_both_passes(adjacent: bool) -> None:  # noqa: FBT001
    full, bias, x, g = torch.randn(12, 6), torch.randn(12), torch.randn(5, 6), torch.randn(5, 12)
    with Recorder() as seen:
        y, kept = gemm.joined_forward(x, parts_of(full, adjacent=adjacent), parts_of(bias, adjacent=adjacent))
        dx = gemm.joined_dgrad(g, parts_of(full, adjacent=adjacent), kept)
    assert seen.count("aten.cat") == (0 if adjacent else 2)  # of the weights and of the biases
    torch.testing.assert_close(y, x @ full.t() + bias)
    torch.testing.assert_close(dx, g @ full)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_operators_pass_opcheck(adjacent: bool, dtype: torch.dtype | None) -> None:  # noqa: FBT001
    weights = parts_of(torch.randn(12, 6, dtype=torch.bfloat16), adjacent=adjacent)
    biases = parts_of(torch.randn(12, dtype=torch.bfloat16), adjacent=adjacent)
    x, g = torch.randn(5, 6, dtype=torch.bfloat16), torch.randn(5, 12, dtype=torch.bfloat16)
    token = joined._joined_forward(x, weights, biases, dtype)[1]
    found = [
        torch.library.opcheck(joined._joined_forward, (x, weights, [], dtype), test_utils=_PURE),
        torch.library.opcheck(joined._joined_forward, (x, weights, biases, dtype), test_utils=_PURE),
        torch.library.opcheck(joined._joined_forward, (x, weights[:1], biases[:1], dtype)),  # nothing to concatenate
        torch.library.opcheck(joined._joined_dgrad, (g, weights, token, dtype is not None)),
    ]
    assert {verdict for checks in found for verdict in checks.values()} == {"SUCCESS"}


# The number of a concatenation differs from call to call, which the check of equal results would take for a fault.
_PURE = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_what_a_graph_keeps_goes_with_its_number() -> None:
    weights = parts_of(torch.randn(12, 6), adjacent=False)
    gc.collect()  # what other tests left
    before = len(joined._KEPT)
    x, g = torch.randn(5, 6), torch.randn(5, 12)
    _, token = joined._joined_forward(x, weights, [], None)
    assert len(joined._KEPT) == before + 1
    with Recorder() as seen:
        first = joined._joined_dgrad(g, weights, token.detach(), False)  # noqa: FBT003
    assert seen.count("aten.cat") == 0
    alias = token.detach()
    del token
    gc.collect()
    assert len(joined._KEPT) == before + 1  # an alias holds the number's memory
    del alias
    gc.collect()
    assert len(joined._KEPT) == before
    gone = joined._joined_dgrad(g, weights, torch.tensor(2**40), False)  # noqa: FBT003
    torch.testing.assert_close(gone, first, rtol=0, atol=0)


def test_parts_of_two_dtypes_are_promoted() -> None:
    wide, narrow = torch.randn(3, 6), torch.randn(4, 6, dtype=torch.bfloat16)
    x = torch.randn(5, 6)
    y, kept = gemm.joined_forward(x, [wide, narrow], [])
    assert kept is not None
    assert kept.dtype == torch.float32
    torch.testing.assert_close(y, x @ torch.cat([wide, narrow.float()]).t())


@pytest.mark.parametrize("adjacent", [True, False])
def test_compiled_autograd_takes_what_an_eager_forward_kept(adjacent: bool) -> None:  # noqa: FBT001
    full, g = torch.randn(12, 6), torch.randn(5, 12)
    x = torch.randn(5, 6, requires_grad=True)
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        linear_with_split_parameters(x, parts_of(full, adjacent=adjacent)).backward(g)
    torch.testing.assert_close(x.grad, g @ full)
