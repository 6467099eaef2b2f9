"""Our subclasses of megatron-core's linears: what they accept, what they compute, what others read of them."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import megatron_frozen
from megatron_frozen.integrations import megatron_core as integration
from megatron_frozen.testing import run_ranks
from tests.functional import megatron_layers_ranks as ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
    from megatron.core.tensor_parallel import layers as upstream_layers

_REQUIRED = inspect.Parameter.empty

# What megatron-core's main branch passes (contracts 4.2): keyword and default, beyond the two sizes.
_BOTH: dict[str, Any] = {
    "config": _REQUIRED, "init_method": _REQUIRED, "stride": 1, "keep_master_weight_for_test": False,
    "is_expert": False, "tp_comm_buffer_name": None, "tp_group": None, "name": None, "pg_collection": None,
}  # fmt: skip
CURRENT_MAIN: dict[str, dict[str, Any]] = {
    "ColumnParallelLinear": {
        **_BOTH, "bias": True, "gather_output": False, "skip_bias_add": False, "skip_weight_param_allocation": False,
        "embedding_activation_buffer": None, "grad_output_buffer": None, "disable_grad_reduce": False,
        "output_dtype": None,
    },
    "RowParallelLinear": {**_BOTH, "bias": _REQUIRED, "input_is_parallel": _REQUIRED, "skip_bias_add": _REQUIRED},
}  # fmt: skip
FORWARD = {"ColumnParallelLinear": {"weight": None, "runtime_gather_output": None}, "RowParallelLinear": {}}


def _class(name: str) -> Any:
    return getattr(integration, name) if name.startswith("Frozen") else getattr(megatron_frozen, name)


@pytest.mark.parametrize("prefix", ["", "Frozen"], ids=["ours", "subclass"])
@pytest.mark.parametrize("name", list(CURRENT_MAIN))
def test_calls_of_both_releases_fit(name: str, prefix: str) -> None:
    """Every keyword of 0.16.1 and of current main is there, with its default; no other one is swallowed."""
    mine = inspect.signature(_class(prefix + name)).parameters
    installed = {
        key: parameter.default
        for key, parameter in inspect.signature(getattr(upstream_layers, name)).parameters.items()
        if key not in ("input_size", "output_size")
    }
    assert list(mine)[:2] == ["input_size", "output_size"]
    for given in (installed, CURRENT_MAIN[name]):
        for key, default in given.items():
            assert mine[key].kind is inspect.Parameter.KEYWORD_ONLY, key
            assert mine[key].default == default, key
    assert not [p for p in mine.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    forward = inspect.signature(_class(prefix + name).forward).parameters
    assert list(forward)[:2] == ["self", "input_"]
    assert {key: forward[key].default for key in FORWARD[name]} == FORWARD[name]


@pytest.mark.parametrize("name", list(CURRENT_MAIN))
def test_they_are_megatrons_classes_too(name: str) -> None:
    made = _class(f"Frozen{name}")
    assert issubclass(made, getattr(upstream_layers, name))
    assert made is _class(f"Frozen{name}")
    with pytest.raises(TypeError, match="unexpected keyword argument 'ub_overlap'"):
        made(4, 4, config=None, init_method=None, ub_overlap=True)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'FrozenEmbedding'"):
        _class("FrozenEmbedding")


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["TP 1", "TP 2", "TP 2 SP"])
def test_values_and_marks_are_upstreams(tp: int, *, sp: bool, frozen: bool) -> None:
    for pairs in run_ranks(tp, ranks.against_upstream, {"sp": sp, "frozen": frozen}):
        assert len(pairs) >= 10
        for name, (mine, theirs) in pairs.items():
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=name)


def test_a_bias_under_a_frozen_weight_gets_its_gradient() -> None:
    for gradient, expected in run_ranks(2, ranks.bias_gradient):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("switch", ["explicit_expert_comm", "disable_grad_reduce"])
def test_switches_set_after_construction_count(switch: str) -> None:
    answers = run_ranks(2, ranks.switched_off_later, switch)
    weight = torch.cat([shard for _, _, shard in answers])
    for collectives, total, _ in answers:
        assert collectives == {}
        torch.testing.assert_close(total, weight.sum(0).expand_as(total))


def test_a_row_layer_leaves_the_sum_to_its_caller() -> None:
    answers = run_ranks(2, ranks.partial_row)
    for collectives, output, input_, weight in answers:
        assert collectives == {}
        torch.testing.assert_close(output, input_ @ weight.t())


def test_fp32_logits_of_a_bf16_head() -> None:
    for dtype, output, expected in run_ranks(2, ranks.wide_logits):
        assert dtype == torch.float32
        torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_deferred_weight_gradients(*, frozen: bool) -> None:
    """The head's buffers hold what its gradient is made of; a frozen head has nothing to put off."""
    for num_inputs, num_grads, is_put_off, error in run_ranks(2, _deferred, frozen):
        assert (num_inputs, num_grads) == ((0, 0) if frozen else (2, 2))
        assert is_put_off
        assert frozen or error < 1e-5


def _deferred(rank: int, world_size: int, frozen: bool) -> Any:  # noqa: FBT001
    return ranks.deferred(rank, world_size, frozen=frozen)


def test_sharded_state_without_metadata() -> None:
    for shapes in run_ranks(2, ranks.metadata_none):
        assert shapes["c.weight"] == (ranks.OUT, ranks.IN)
        assert shapes["c.bias"] == (ranks.OUT,)
        assert shapes["r.weight"] == (ranks.IN, ranks.OUT)
        assert shapes["r.bias"] == (ranks.IN,)
        assert {"c._extra_state", "r._extra_state"} <= set(shapes)


def test_what_auto_mapping_reads() -> None:
    for column, row in run_ranks(2, ranks.unfilled):
        assert column == (True, 0, True, 0)
        assert row == (True, 1, True, 1)


def test_classes_survive_pickle() -> None:
    (names,) = run_ranks(1, ranks.pickled_classes)
    assert names[0] == "megatron_frozen.integrations.megatron_core.FrozenColumnParallelLinear"
    assert len(set(names)) == 4
