"""A model cut by FSDP: what a rank holds and gathers, marks and values of parts, adapters beside a base that is cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations import fsdp
from megatron_frozen.testing import run_ranks
from megatron_frozen.train.job import train
from tests.unit import sharding_ranks
from tests.unit.train_job_toy import toy_config, toy_model


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_ranks_hold_their_part_and_gather_one_layer_at_a_time(tmp_path: Path, *, lora: bool) -> None:
    folder = str(toy_model(tmp_path / "base", num_hidden_layers=8))
    runs = {
        cut: run_ranks(2, partial(sharding_ranks.memory, folder=folder, cut=cut, lora=lora))[0] for cut in (True, False)
    }
    cut, whole = runs[True], runs[False]
    assert whole["peak"] == whole["held"]
    one_row = 48 * 4  # more is held of an embedding with an odd number of rows
    assert abs(cut["held"] - whole["held"] / 2) <= one_row
    assert abs(cut["peak"] - (cut["held"] + cut["root"] + cut["layer"])) <= one_row
    assert cut["peak"] < 0.8 * whole["peak"]


def test_parts_keep_marks_and_values_also_of_a_padded_vocabulary(tmp_path: Path) -> None:
    folder = str(toy_model(tmp_path / "base", attention_bias=True))
    for found in run_ranks(4, partial(sharding_ranks.marks, folder=folder)):
        cut, whole = found[True], found[False]
        assert cut.keys() == whole.keys()
        assert any(sharded for sharded, _, _ in whole.values())
        assert any(partial_grad for _, partial_grad, _ in whole.values())
        for name in whole:
            assert cut[name][:2] == whole[name][:2], name
            assert torch.equal(cut[name][2], whole[name][2]), name


def test_old_torch_is_refused_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "_NEEDS", "an_attribute_that_no_tensor_has")
    with pytest.raises(ConfigError, match=r"fsdp is true, but torch .* or set fsdp=false"):
        train(toy_config(tmp_path, fsdp=True))
    assert not (tmp_path / "run").exists()


def test_one_rank_has_nothing_to_cut_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(toy_config(tmp_path, fsdp=True, max_steps=1))
    assert "fsdp has nothing to cut, as there is one data-parallel rank" in capsys.readouterr().err


def test_adapters_stay_whole_and_their_gradients_are_the_same(tmp_path: Path) -> None:
    """fp32 adapters on a bf16 base in one FSDP unit, one of them first used in the second micro-batch."""
    folder = str(toy_model(tmp_path / "base"))
    ranks = run_ranks(2, partial(sharding_ranks.adapters, folder=folder))
    for found in ranks:
        assert found["base without gradient"]
        for cut, whole, first in zip(found["cut"], found["whole"], ranks[0]["cut"], strict=True):
            assert torch.equal(cut, whole)
            assert torch.equal(cut, first)
