"""`megatron-frozen bench gpt-model` at a tiny size, and that megatron-core is left as it was found."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import pytest
import torch

from megatron_frozen.bench import gpt_model
from megatron_frozen.cli import main
from megatron_frozen.integrations.megatron_core import is_patched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
    from megatron.core import parallel_state, tensor_parallel


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bench(*arguments: str | Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which no command shows; others are errors here
        return main(["bench", "gpt-model", *map(str, arguments)])


def test_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker, device = tensor_parallel.get_cuda_rng_tracker, torch.cuda.current_device
    assert bench("--small", "--repeats", "1", "--output", tmp_path) == 0
    rows = read(tmp_path / "gpt_model.csv")
    installed, patched = (row for row in rows if row["kind"] == "time")
    assert (installed["way"], patched["way"]) == (gpt_model.INSTALLED, gpt_model.PATCHED)
    assert set(gpt_model.COLUMNS) <= set(installed)
    assert int(installed["batched_products"]) == int(patched["batched_products"]) + 1  # the head's
    assert {row["megatron_core"] for row in rows} == {"0.16.1"}
    near = [row for row in rows if row["kind"] == "target"][1:]
    assert [row["met"] for row in near] == ["yes", "yes"], near
    printed = capsys.readouterr().out
    assert "at least 20" in printed
    assert "at most 1e-05" in printed
    assert (tmp_path / "gpt_model.png").stat().st_size > 1000
    assert tensor_parallel.get_cuda_rng_tracker is tracker
    assert torch.cuda.current_device is device
    assert not is_patched()
    assert not parallel_state.model_parallel_is_initialized()


def test_every_adapter_learns_the_same_in_fp64() -> None:
    sizes = gpt_model.Sizes(vocab=50, seq=8, hidden=32, num_layers=1)
    with warnings.catch_warnings(), gpt_model._megatron_on_cpu():
        warnings.simplefilter("ignore")
        found = [gpt_model.results(sizes, torch.float64, way=way) for way in (gpt_model.INSTALLED, gpt_model.PATCHED)]
    assert len(found[0]) == 1 + 2 * 4
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value.any(), name
        torch.testing.assert_close(found[1][name], value, msg=name)
