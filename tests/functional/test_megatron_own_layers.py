"""This package's own layers take megatron-core's config objects and enter its distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_frozen import ColumnParallelLinear, ModelParallelConfig
from megatron_frozen.errors import ConfigError
from megatron_frozen.layers import sharded_state
from megatron_frozen.testing import run_ranks
from tests.functional import megatron_own_layers_ranks as ranks


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["TP 1", "TP 2", "TP 2 SP"])
def test_a_transformer_config_builds_our_layers(tp: int, *, sp: bool) -> None:
    """The same weights, outputs and gradients as megatron-core's layers under the same object."""
    for pairs in run_ranks(tp, ranks.both, {"sequence_parallel": sp}):
        assert len(pairs) == 6
        for name, (mine, theirs) in pairs.items():
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("body", [ranks.ours_into_upstreams, ranks.upstreams_into_ours])
def test_distributed_checkpoints_interchange(tmp_path: Path, body: Any) -> None:
    for differences in run_ranks(2, body, str(tmp_path / "saved")):
        assert len(differences) == 5
        assert set(differences.values()) == {0.0}


@pytest.mark.parametrize("body", [ranks.global_shapes, ranks.global_shapes_in_older_releases])
def test_each_part_is_cut_for_itself(body: Any) -> None:
    for shapes in run_ranks(2, body):
        assert shapes["c.q_weight"] == (8, ranks.HIDDEN)
        assert shapes["c.k_weight"] == (4, ranks.HIDDEN)
        assert shapes["c.q_bias"] == (8,)
        assert shapes["n.k_weight"] == shapes["l.k_weight"] == (4, ranks.HIDDEN)
        assert shapes["n.layer_norm_weight"] == (ranks.HIDDEN,)
        assert shapes["n.q_bias"] == shapes["l.q_bias"] == (8,)
        assert shapes["r.weight"] == (4, 4)
        assert "r._extra_state" in shapes


def test_without_the_integration(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer in place of the silent one: megatron-core would keep one rank's shard as the whole."""
    monkeypatch.setattr(sharded_state, "_GIVEN", [])
    layer = ColumnParallelLinear(2, 2, config=ModelParallelConfig(), init_method=torch.nn.init.ones_)
    with pytest.raises(ConfigError, match=r"its integration is not imported; import megatron_frozen\.integrations"):
        layer.sharded_state_dict()
