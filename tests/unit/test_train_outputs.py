"""What a run writes and shows: learning rate, metrics, TensorBoard, picture, progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_frozen import kernels
from megatron_frozen.errors import CheckpointError
from megatron_frozen.train.job import train
from megatron_frozen.train.metrics import MetricsFile, read_metrics
from megatron_frozen.train.plot import plot_loss
from megatron_frozen.train.progress import Progress
from megatron_frozen.train.schedule import learning_rate_at
from megatron_frozen.train.tensorboard import TensorBoardLog
from tests.unit.disk_limit import largest_file
from tests.unit.train_job_toy import toy_config


def test_learning_rate_rises_then_falls_as_a_cosine():
    rates = [learning_rate_at(s, peak=2.0, warmup_steps=4, max_steps=12, min_ratio=0.1) for s in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * 0.55)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate_at(1, peak=2.0, warmup_steps=0, max_steps=1, min_ratio=0.0) == 2.0
    assert learning_rate_at(2, peak=2.0, warmup_steps=0, max_steps=2, min_ratio=0.0) == 0.0
    assert learning_rate_at(3, peak=2.0, warmup_steps=3, max_steps=3, min_ratio=0.0) == 2.0


def test_metrics_are_cut_back_to_the_step_of_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, from_step=None)
    for step in range(1, 6):
        metrics.write("train", step=step, loss=1 / step)
    metrics.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # what a crash leaves
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    resumed = MetricsFile(path, from_step=3)
    resumed.write("eval", step=4, loss=0.5)
    resumed.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [
        ("train", 1), ("train", 2), ("train", 3), ("eval", 4),
    ]  # fmt: skip
    assert records == resumed.records
    MetricsFile(path, from_step=None).close()
    assert path.read_text() == ""
    assert read_metrics(tmp_path / "none.jsonl") == []
    for junk in (b"\xff\xfe", b"5", b"{}", b'{"kind": "train", "step": "1"}'):
        path.write_bytes(b'{"kind": "train", "step": 1, "loss": 2.0}\n' + junk + b"\n")
        assert [record["step"] for record in read_metrics(path)] == [1]


def test_metrics_on_a_full_disk_name_their_file(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", from_step=None)
    metrics.write("train", step=1, loss=1.0)
    text = r"cannot add to .*metrics\.jsonl \(File too large\); free space on its disk, and start again to resume"
    with largest_file(num_bytes=60):
        with pytest.raises(CheckpointError, match=text):
            metrics.write("train", step=2, loss=0.5)
        metrics.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_tensorboard_hides_what_a_resume_does_again(tmp_path):
    for from_step, steps, value in ((None, (1, 2, 3), 1.0), (1, (2,), 5.0)):
        log = TensorBoardLog(tmp_path, from_step=from_step)
        for step in steps:
            log.write("train", step=step, loss=value)
        log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 5.0)]


def test_loss_curve_is_a_picture(tmp_path):
    records = [{"kind": "train", "step": s, "loss": 3 / s} for s in range(1, 9)]
    records += [{"kind": "eval", "step": s, "loss": 3 / (s + 1)} for s in (0, 8)]
    plot_loss(records, tmp_path / "loss.png", title="toy")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_loss([], tmp_path / "empty.png", title="nothing yet")
    full, empty = ((tmp_path / name).stat().st_size for name in ("loss.png", "empty.png"))
    assert full > empty > 5000


def test_progress_off_a_terminal_is_a_few_plain_lines(capsys):
    progress = Progress(first_step=2, max_steps=5, visible=True, line_every_s=1000)
    for step in (3, 4, 5):
        progress.report(step, loss=1.5, tokens_per_s=99.6)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["step 3/5", "loss 1.5000", "100 tokens/s"],
        ["step 5/5", "loss 1.5000", "100 tokens/s"],
    ]
    assert lines[0].endswith("? left")
    assert lines[1].endswith("00:00 left")
    Progress(first_step=0, max_steps=5, visible=False).report(5, loss=1.5, tokens_per_s=1.0)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress(first_step=0, max_steps=2, visible=True)
    progress.report(1, loss=1.25, tokens_per_s=10.0)
    progress.say("a word")
    progress.report(2, loss=1.0, tokens_per_s=10.0)
    progress.close()
    shown = capsys.readouterr().err
    assert "a word" in shown
    assert "2/2" in shown
    assert "loss 1.0000, 10 tokens/s" in shown


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_bf16_job_without_the_cpu_kernels_says_once_what_is_missing(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "absent", lambda: "there is no C++ compiler here")
    train(toy_config(tmp_path, max_steps=1, sample_max_new_tokens=0, dtype=dtype))
    line = "steps take longer than they could, without the kernels for this CPU: there is no C++ compiler here"
    assert capsys.readouterr().err.count(line) == (dtype == "bf16")
