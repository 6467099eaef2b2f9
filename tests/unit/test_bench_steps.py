"""Benchmarks of whole steps: ways in processes of their own, equal losses, verdicts."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from megatron_frozen.bench import hf_peers, lora_step, rl_step, runner, workers
from megatron_frozen.bench.growth_step import PointConfig, build_step
from megatron_frozen.bench.runner import BenchConfig, Row
from megatron_frozen.bench.workers import Run, Step, take_turns
from megatron_frozen.diagnostics import Recorder
from megatron_frozen.errors import ConfigError, MegatronFrozenError
from megatron_frozen.gemm import peers
from megatron_frozen.train import compiling

SHAPE = (4, 2, 16)


def counting(*, first: float) -> Step:
    return lambda index: {"loss": first + index}


def taking_128_mib(*, in_step: int) -> Step:
    def step(index: int) -> dict[str, float]:
        return {"loss": float(torch.ones(2**25)[0]) if index == in_step else 0.0}

    return step


def failing() -> Step:
    raise ArithmeticError("this way cannot be built")


def test_ways_take_turns_in_processes_of_their_own() -> None:
    runs = take_turns({"a": partial(counting, first=1.0), "b": partial(counting, first=5.0)}, num_steps=3)
    assert runs["a"].all("loss") == [1.0, 2.0, 3.0]
    assert runs["b"].all("loss") == [5.0, 6.0, 7.0]
    assert runs["b"].median("loss", after=1) == 6.5
    assert all(run.peak_mib > 0 and len(run.all("seconds")) == 3 for run in runs.values())


def test_a_way_of_fewer_steps_takes_them_spread_over_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    ways = {"a": partial(counting, first=1.0), "b": partial(counting, first=5.0)}
    runs = take_turns(ways, num_steps=5, fewer={"b": 2})
    assert runs["a"].all("loss") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert runs["b"].all("loss") == [5.0, 6.0], "its own second step, not the round's"
    assert [workers._rounds(steps, of=6) for steps in (1, 2, 6)] == [{0}, {0, 3}, set(range(6))]
    said = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    rounds = [f"round {number} of 5" for number in range(1, 6)]
    assert said == ["built a", "built b", "first step of a", "first step of b", *rounds]


def test_a_way_that_fails_ends_the_benchmark_with_its_reason() -> None:
    with pytest.raises(MegatronFrozenError, match=r"so there is nothing to compare(.|\n)*this way cannot be built"):
        take_turns({"a": failing}, num_steps=1)


def test_the_peak_leaves_out_what_the_first_step_took_and_gave_back() -> None:
    ways = {index: partial(taking_128_mib, in_step=index) for index in range(3)}
    runs = take_turns({str(index): way for index, way in ways.items()}, num_steps=3)
    first, second, last = (runs[str(index)].peak_mib for index in ways)
    if not math.isnan(first):
        assert min(second, last) - first > 100
        assert abs(second - last) < 20


def test_a_way_runs_where_the_system_does_not_count_its_peak_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_RESET", tmp_path / "missing")
    ours, theirs = multiprocessing.Pipe()
    for question in (0, 1, None):
        ours.send(question)
    workers._serve(theirs, partial(counting, first=1.0), torch.get_num_threads())
    built, *steps, peak = (ours.recv() for _ in range(4))
    assert built == {}
    assert [step["loss"] for step in steps] == [1.0, 2.0]
    assert math.isnan(peak["peak_mib"])


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


def test_every_way_updates_its_weights_by_one_fused_call(base: tuple[Path, Path]) -> None:
    folder, adapter = base
    ways = dict(lora_step._ways(folder, adapter, lora_step._small_ids(SHAPE)))
    del ways[lora_step.FLOOR]
    steps = {name: build() for name, build in ways.items()}
    for full in (False, True):
        steps[f"rl-step, full: {full}"] = rl_step.step_of(rl_step.SMALL, product=None, full=full)
    growing = build_step(PointConfig(sequence=32, vocabulary=256, hidden=64, layers=2, rank=4))
    steps["growth"] = lambda _: {"loss": float(growing())}
    for name, step in steps.items():
        with torch.compiler.set_stance("force_eager"), Recorder() as seen:
            step(0)
        assert (seen.count("aten._fused_adamw_"), seen.count("aten.addcdiv_")) == (1, 0), name


def test_loading_peers_prints_and_warns_nothing(base: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, adapter = base
    common = {"folder": folder, "rows": lora_step._small_ids(SHAPE), "learning_rate": 1e-3}
    was_enabled = logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_peers.full_step(**common)
        hf_peers.lora_step(**common, adapter=adapter, fp32_adapters=True, compiled=False)
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled() == was_enabled


def test_a_text_longer_than_a_model_takes_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", model_max_length=3).save_pretrained(tmp_path)
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        rows = hf_peers.token_rows(tmp_path, "a b a b a b c", shape=(1, 2, 3))
        assert not caplog.messages
        AutoTokenizer.from_pretrained(tmp_path)("a b a b")
    finally:
        logger.removeHandler(caplog.handler)
    assert rows.tolist() == [[[0, 1, 0], [1, 0, 1]]]
    assert "Token indices sequence length is longer" in caplog.text, "what it says unless told not to"


def test_a_lora_step_without_a_compiler_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "unsupported", lambda: "torch.compile fails on this machine")
    monkeypatch.setattr(lora_step, "measure", lambda _: pytest.fail("it began"))
    with pytest.raises(ConfigError, match=r"lora-step compiles two of its ways, but torch\.compile fails"):
        lora_step.run(BenchConfig(output=tmp_path, small=True))


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


@pytest.mark.parametrize(
    "product", [None, rl_step.UnfoldedInPart(), peers.flattened], ids=["ours", "unfolded", "flattened"]
)
def test_all_ways_of_the_rl_step_have_one_loss(product: rl_step.Product | None) -> None:
    step = rl_step.step_of(rl_step.SMALL, product=product, full=False)
    expected = rl_step.step_of(rl_step.SMALL, product=None, full=False)(0)
    found = step(0)
    assert found["grad_norm"] > 0
    assert bool(found["reckoned_s"]) == isinstance(product, rl_step.UnfoldedInPart)
    assert found["step_s"] >= found["forward_backward_s"] >= found["reckoned_s"]
    for figure in ("loss", "grad_norm"):
        assert found[figure] == pytest.approx(expected[figure], rel=1e-2)
    assert rl_step.step_of(rl_step.SMALL, product=None, full=True)(0)["grad_norm"] > found["grad_norm"]


def test_rows_and_targets_of_the_rl_step() -> None:
    def run_of(*seconds: float) -> Run:
        same = {"loss": 1.0, "grad_norm": 2.0, "reckoned_s": 0.0, "seconds": 0.5}
        return Run(figures=[same | {"step_s": each, "forward_backward_s": each / 2} for each in seconds])

    runs = {rl_step.FULL: run_of(9, 9, 4, 4, 4, 4), rl_step.OURS: run_of(9, 9, 2.5, 2.5, 2.5, 2.5)}
    rows = {str(row["way"]): row for row in rl_step.rows_of(runs)}
    found = {way: (row["step_s"], row["samples"], row["step_ratio_to_full"]) for way, row in rows.items()}
    assert found == {rl_step.FULL: (4, 4, 1), rl_step.OURS: (2.5, 4, 0.625)}
    targets = [(row["value"], row["target"], row["met"]) for row in rl_step.verdicts(rows)]
    assert targets == [(0.625, "at most 0.75", "yes"), (0.625, "at most 0.6", "no")]


def test_the_unfolded_product_runs_for_a_part_of_the_tokens_and_is_reckoned_for_the_rest() -> None:
    product, weight = rl_step.UnfoldedInPart(), torch.randn(48, 8)
    for tensor, num_batched in ((torch.randn(1, 64, 48).transpose(0, 1), 1), (torch.randn(64, 1, 48), 0)):
        before = product.reckoned_s
        with Recorder() as whole:
            expected = peers.batched(tensor, weight)
        with Recorder() as part:
            found = product(tensor, weight)
        assert torch.allclose(found, expected, atol=1e-5)
        assert whole.count("aten.bmm") == part.count("aten.bmm") == num_batched
        assert (product.reckoned_s != before) == bool(num_batched)


def test_a_way_of_fewer_steps_is_compared_with_as_many_of_peft() -> None:
    def run_of(*losses: float) -> Run:
        return Run(figures=[{"seconds": 2.0, "loss": loss} for loss in losses])

    peft = run_of(3.0, 2.0, 1.0)
    row = lora_step._row(lora_step.APART, run_of(3.0, 2.5), peft, floor_s=1.0, num_tokens=8, num_warm=1)
    assert (row["loss_error"], row["samples"], row["ratio_to_floor"]) == (0.5, 1, 2)


def test_rows_of_text_have_the_asked_shape(tmp_path: Path) -> None:
    assert len(lora_step._text()) > 300_000
    assert torch.equal(lora_step._small_ids(SHAPE), lora_step._small_ids(SHAPE))
