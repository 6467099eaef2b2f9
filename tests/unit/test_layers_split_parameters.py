"""How layers hold split parameters: names, sizes, marks, storage, and what is refused; contracts 3, case 51."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import ColumnParallelLinear, LayerNormLinear, Linear, ModelParallelConfig
from megatron_frozen.storage import adjacent_view
from tests.unit.core_ranks import seeded

SPLIT = {"q_": 8, "k_": 4, "v_": 4}
KEYS = ["q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias"]


def _column(split: Any, **options: Any) -> ColumnParallelLinear:
    config = ModelParallelConfig()
    return ColumnParallelLinear(
        8, 16, config=config, init_method=nn.init.xavier_normal_, parameters_split=split, **options
    )


def _parts(layer: Any) -> list[torch.Tensor]:
    return [getattr(layer, name) for name in layer.weight_names]


def _joined(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    biases = [getattr(layer, name) for name in layer.bias_names]
    return torch.cat(_parts(layer)).detach(), torch.cat(biases).detach()


def _assert_right(layer: Any) -> None:
    """The output is that of the joined weight, whatever memory the parts lie in."""
    weight, bias = _joined(layer)
    input_ = seeded(3, 2, 8, seed=1, dtype=weight.dtype)
    output = layer(input_)
    torch.testing.assert_close(output, nn.functional.linear(input_, weight, bias))


def test_names_and_sizes() -> None:
    layer: Any = Linear(8, 16, parameters_split=SPLIT)
    assert list(layer.state_dict()) == KEYS
    assert layer.weight_names == KEYS[:3]
    assert layer.bias_names == KEYS[3:]
    assert layer.parameter_split_sizes == [8, 4, 4]
    assert [tuple(part.shape) for part in _parts(layer)] == [(8, 8), (4, 8), (4, 8)]
    assert not hasattr(layer, "weight")
    assert "parts={'q_weight': 8, 'k_weight': 4, 'v_weight': 4}" in repr(layer)


def test_a_sequence_gives_equal_parts_and_underscores_inside_stay() -> None:
    layer: Any = Linear(8, 16, parameters_split=("q", "my_split__"), bias=False)
    assert list(layer.state_dict()) == ["q_weight", "my_split_weight"]
    assert layer.parameter_split_sizes == [8, 8]
    assert layer.q_bias is None


def test_without_a_split_there_is_one_weight() -> None:
    layer: Any = Linear(8, 16)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert layer.weight_names == ["weight"]
    assert layer.parameter_split_sizes == [16]
    _assert_right(layer)


def test_a_part_is_initialised_as_if_it_stood_alone() -> None:
    torch.manual_seed(3)
    layer: Any = Linear(8, 16, parameters_split=SPLIT, init_method=nn.init.xavier_uniform_)
    torch.manual_seed(3)
    for part in _parts(layer):
        assert torch.equal(part, nn.init.xavier_uniform_(torch.empty(part.shape)))
    torch.manual_seed(3)
    default: Any = Linear(8, 16, parameters_split=SPLIT)
    torch.manual_seed(3)
    assert torch.equal(default.q_weight, torch.empty(8, 8).normal_(std=0.023))
    assert not default.q_bias.any()


def test_keys_of_a_layer_with_a_norm() -> None:
    layer: Any = LayerNormLinear(8, 16, parameters_split=SPLIT)
    assert list(layer.state_dict()) == ["layer_norm_weight", "layer_norm_bias", *KEYS]
    plain = LayerNormLinear(8, 16, normalization="RMSNorm", bias=False)
    assert list(plain.state_dict()) == ["layer_norm_weight", "weight"]
    assert "RMSNorm, eps=1e-05" in repr(plain)


@pytest.mark.parametrize("mode", [None, "column", "row"])
def test_marks(mode: Any) -> None:
    layer: Any = Linear(8, 16, parameters_split=SPLIT, parallel_mode=mode)
    dims = {None: (False, -1), "column": (True, 0), "row": (True, 1)}
    for part in _parts(layer):
        assert (part.tensor_model_parallel, part.partition_dim, part.partition_stride) == (*dims[mode], 1)  # pyright: ignore[reportAttributeAccessIssue]
    assert layer.k_bias.tensor_model_parallel == (mode == "column")
    copied: Any = copy.deepcopy(layer)
    assert copied.k_weight.partition_dim == layer.k_weight.partition_dim


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("qkv", "each letter would be a name"),
        (7, "is of type int"),
        ({"q", "k"}, "is of type set"),
        ([], "names? at least one part"),
        ({}, "name at least one part"),
        (["q", 3], "names of parts are strings"),
        (["q", "__"], "nothing is left without trailing underscores"),
        (["q", ""], "nothing is left without trailing underscores"),
        (["a.q", "k"], "dot in a parameter's name"),
        (["q", "q_"], "names the part 'q' twice"),
        ({"q": 8, "q__": 8}, "names the part 'q' twice"),
        ({"q": 8.0, "k": 8}, "gives the part 'q' the size 8.0"),
        ({"q": 15, "k": True}, "gives the part 'k' the size True"),
        ({"q": 16, "k": 0}, "gives the part 'k' the size 0"),
        ({"q": 17, "k": -1}, "gives the part 'k' the size -1"),
        ({"q": 8, "k": 7}, r"\(q: 8, k: 7\) sum to 15 where out_features is 16"),
        (["q", "k", "v"], r"does not divide into 3 equal parts \(q, k, v\)"),
        ([*"abcdefghijklmnopqrstuvwxyzABCDEF"], "16, which does not divide into 32 equal parts"),
        (["layer_norm", "k"], "parameter named 'layer_norm_weight', which LayerNormLinear has already"),
    ],
)
def test_a_bad_split_is_one_error(split: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerNormLinear(8, 16, parameters_split=split)


@pytest.mark.parametrize("size", [0, -4, 4.0])
def test_parts_without_rows_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="does not divide into 2 equal parts"):
        Linear(8, size, parameters_split=["q", "k"])


@pytest.mark.parametrize("bias", [False, True])
def test_a_part_may_not_take_a_name_of_the_layer(*, bias: bool) -> None:
    with pytest.raises(ConfigError, match="'use_bias', which Linear has already"):
        Linear(8, 16, parameters_split=["use", "k"], bias=bias)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Linear(8, 16, parallel_mode="rows"), "give 'column', 'row', or None for a whole layer"),  # pyright: ignore[reportArgumentType]
        (lambda: LayerNormLinear(8, 16, normalization="L2"), "normalization is 'L2'; give 'LayerNorm' or 'RMSNorm'"),  # pyright: ignore[reportArgumentType]
        (lambda: LayerNormLinear(8, 16, parallel_mode="row"), "use a norm and a Linear"),
        (lambda: _column(SPLIT, stride=2), "parameters_split is given beside a stride"),
        (lambda: _column(SPLIT, skip_weight_param_allocation=True), "parameters_split is given beside a stride"),
        (lambda: _column(SPLIT, embedding_activation_buffer=[]), "about one whole weight"),
        (lambda: _column(SPLIT)(torch.ones(2, 8), torch.ones(16, 8)), "parameters_split and got a weight in forward"),
    ],
)
def test_options_that_do_not_fit(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_column_layer_with_parts_is_one_with_the_joined_weight() -> None:
    layer: Any = _column(SPLIT, skip_bias_add=True)
    assert list(layer.state_dict()) == KEYS
    weight, _ = _joined(layer)
    with torch.no_grad():
        layer.k_bias.fill_(2.0)
    input_ = seeded(3, 2, 8, seed=1, dtype=torch.float32)
    output, bias = layer(input_)
    torch.testing.assert_close(output, nn.functional.linear(input_, weight))
    assert bias is not None
    assert bias.tolist() == [0.0] * 8 + [2.0] * 4 + [0.0] * 4
    assert layer.weight is None
    assert layer.bias is None
    assert "bias=True, TP=1, parts=" in repr(layer)
    added, none = _column(SPLIT)(input_)
    assert none is None
    assert added.shape == (3, 2, 16)


def test_the_steps_of_a_column_layer_are_its_forward() -> None:
    layer: Any = _column(SPLIT)
    with torch.no_grad():
        layer.v_bias.fill_(3.0)
    input_ = seeded(3, 2, 8, seed=1, dtype=torch.float32)
    by_steps, _ = layer.leave_parallel(layer.multiply(layer.enter_parallel(input_)))
    torch.testing.assert_close(by_steps, layer(input_)[0])
    assert layer.repack_()
    assert _column(None).repack_()


def _stepped(layer: Linear) -> Linear:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return layer


def _loaded(layer: Linear, *, assign: bool) -> Linear:
    layer.load_state_dict(Linear(8, 16, parameters_split=SPLIT).state_dict(), assign=assign)
    return layer


def _saved(layer: Linear) -> Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("change", "stays_adjacent"),
    [
        (lambda layer: layer, True),
        (_stepped, True),
        (lambda layer: _loaded(layer, assign=False), True),
        (lambda layer: _loaded(layer, assign=True), True),
        (_saved, True),
        (lambda layer: layer.to(torch.float32), True),
        (lambda layer: layer.share_memory(), True),
        (copy.deepcopy, False),
        (lambda layer: layer.double(), False),
    ],
    ids=[
        "new",
        "optimizer step",
        "load",
        "load assign",
        "torch.save",
        "no-op to",
        "share_memory",
        "deepcopy",
        "double",
    ],
)
def test_storage(change: Callable[[Linear], Linear], *, stays_adjacent: bool) -> None:
    layer: Any = change(Linear(8, 16, parameters_split=SPLIT))
    assert (adjacent_view(_parts(layer)) is not None) == stays_adjacent
    _assert_right(layer)
    values, owners = [part.clone() for part in layer.parameters()], list(layer.parameters())
    assert layer.repack_()
    assert adjacent_view(_parts(layer)) is not None
    assert adjacent_view([layer.q_bias, layer.k_bias, layer.v_bias]) is not None
    assert all(torch.equal(part, value) for part, value in zip(layer.parameters(), values, strict=True))
    assert all(part is owner for part, owner in zip(layer.parameters(), owners, strict=True))
    _assert_right(layer)


def test_a_layer_made_on_meta_is_filled_later() -> None:
    layer: Any = LayerNormLinear(8, 16, parameters_split=SPLIT, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    source = LayerNormLinear(8, 16, parameters_split=SPLIT)
    layer.load_state_dict(source.state_dict())
    assert layer.repack_()
    input_ = torch.randn(3, 8)
    assert torch.equal(layer(input_), source(input_))
    assert layer.q_weight.partition_stride == 1


def test_writing_to_one_part_is_no_write_to_another() -> None:
    layer: Any = Linear(8, 16, parameters_split=SPLIT)
    before = layer.q_weight._version
    with torch.no_grad():
        layer.k_weight.zero_()
    assert layer.q_weight._version == before


def test_extra_state_of_transformer_engine_loads() -> None:
    layer: Any = Linear(8, 16, parameters_split=SPLIT)
    layer.load_state_dict(layer.state_dict() | {"_extra_state": torch.zeros(1)})
    assert list(layer.state_dict()) == KEYS


def test_messages_call_a_part_by_its_name() -> None:
    layer: Any = Linear(8, 16, parameters_split=SPLIT, fuse_wgrad_accumulation=True, name="decoder.qkv")
    output = layer(torch.ones(2, 8))
    with pytest.raises(ConfigError, match=r"weight 'decoder.qkv.q_weight' of shape \[8, 8\] trains and has neither"):
        output.sum().backward()


@pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear])
def test_the_bias_is_left_to_the_caller(layer_type: type) -> None:
    layer = layer_type(8, 16, parameters_split=SPLIT, return_bias=True)
    with torch.no_grad():
        layer.k_bias.fill_(2.0)
    output, bias = layer(torch.ones(2, 8))
    assert bias.tolist() == [0.0] * 8 + [2.0] * 4 + [0.0] * 4
    (output + bias).sum().backward()
    assert layer.q_bias.grad.tolist() == [2.0] * 8
    assert layer_type(8, 16, bias=False, return_bias=True)(torch.ones(2, 8))[1] is None
