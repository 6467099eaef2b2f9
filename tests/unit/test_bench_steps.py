"""Benchmarks of whole steps: ways in processes of their own, equal losses, verdicts."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_frozen.bench import hf_peers, lora_step, rl_step
from megatron_frozen.bench.runner import Row
from megatron_frozen.bench.workers import Step, take_turns
from megatron_frozen.errors import MegatronFrozenError
from megatron_frozen.gemm import peers

SHAPE = (4, 2, 16)


def counting(*, first: float) -> Step:
    return lambda index: {"loss": first + index}


def failing() -> Step:
    raise ArithmeticError("this way cannot be built")


def test_ways_take_turns_in_processes_of_their_own() -> None:
    runs = take_turns({"a": partial(counting, first=1.0), "b": partial(counting, first=5.0)}, num_steps=3)
    assert runs["a"].all("loss") == [1.0, 2.0, 3.0]
    assert runs["b"].all("loss") == [5.0, 6.0, 7.0]
    assert runs["b"].median("loss", after=1) == 6.5
    assert all(run.peak_mib > 0 and len(run.all("seconds")) == 3 for run in runs.values())


def test_a_way_that_fails_ends_the_benchmark_with_its_reason() -> None:
    with pytest.raises(MegatronFrozenError, match=r"so there is nothing to compare(.|\n)*this way cannot be built"):
        take_turns({"a": failing}, num_steps=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    scratch = tmp_path_factory.mktemp("base")
    folder = lora_step._small_model(scratch / "model")
    return folder, lora_step._first_adapter(folder, scratch / "adapter")


def test_all_ways_of_the_lora_step_have_one_loss(base: tuple[Path, Path]) -> None:
    folder, adapter = base
    rows = lora_step._small_ids(SHAPE)
    common = {"folder": folder, "adapter": adapter, "rows": rows, "learning_rate": 1e-2}
    ways = {
        "ours": lora_step.our_step(**common, compiled=False, apart=False),
        "apart": lora_step.our_step(**common, compiled=False, apart=True),
        "peft": hf_peers.lora_step(**common, fp32_adapters=True, compiled=False),
    }
    losses = {name: [step(index)["loss"] for index in range(4)] for name, step in ways.items()}
    assert losses["ours"][3] != pytest.approx(losses["ours"][0], abs=1e-3)
    for name in ("apart", "peft"):
        assert losses[name] == pytest.approx(losses["ours"], abs=1e-2), name


def test_full_fine_tuning_and_the_floor_step_too(base: tuple[Path, Path]) -> None:
    rows = lora_step._small_ids(SHAPE)
    assert math.isfinite(hf_peers.full_step(folder=base[0], rows=rows, learning_rate=1e-3)(0)["loss"])
    assert math.isnan(lora_step.floor_step(folder=base[0], rows=rows)(0)["loss"])


def test_verdicts_of_the_lora_step_take_the_faster_of_ours() -> None:
    rows: dict[str, Row] = {
        way: {"median_s": seconds, "peak_mib": 100.0, "loss_error": 0.0}
        for way, seconds in (
            (lora_step.OURS, 2.0), (lora_step.COMPILED, 1.0), (lora_step.PEFT, 4.0), (lora_step.PEFT_BF16, 3.0),
            (lora_step.PEFT_COMPILED, 1.4), (lora_step.FULL, 4.0),
        )
    }  # fmt: skip
    found = {str(row["figure"]): (row["value"], row["met"]) for row in lora_step.verdicts(rows)}
    assert found["fastest peer's time over ours"] == (1.4, "no")
    assert found["peft's time over ours"] == (4.0, "yes")
    assert found["peak memory over peft's"] == (1.0, "no")


@pytest.mark.parametrize("product", [None, peers.batched, peers.flattened], ids=["ours", "unfolded", "flattened"])
def test_all_ways_of_the_rl_step_have_one_loss(product: rl_step.Product | None) -> None:
    step = rl_step.step_of(rl_step.SMALL, product=product, full=False)
    expected = rl_step.step_of(rl_step.SMALL, product=None, full=False)(0)
    found = step(0)
    assert found["grad_norm"] > 0
    for figure in ("loss", "grad_norm"):
        assert found[figure] == pytest.approx(expected[figure], rel=1e-2)
    assert rl_step.step_of(rl_step.SMALL, product=None, full=True)(0)["grad_norm"] > found["grad_norm"]


def test_rows_of_text_have_the_asked_shape(tmp_path: Path) -> None:
    assert len(lora_step._text()) > 300_000
    assert torch.equal(lora_step._small_ids(SHAPE), lora_step._small_ids(SHAPE))
