"""`compile: true` in a job: the losses of the job without, and clear sentences where it cannot be."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

from megatron_frozen.errors import ConfigError
from megatron_frozen.train.config import check_inputs
from megatron_frozen.train.job import train
from tests.unit.train_job_toy import losses, toy_config


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_a_compiled_job_has_the_losses_of_an_eager_one_and_an_eager_one_goes_on_from_it(tmp_path: Path) -> None:
    constant_rate = {"min_learning_rate_ratio": 1.0}  # whatever max_steps is
    config = toy_config(tmp_path, packing=True, micro_batch_size=2, sample_max_new_tokens=0, **constant_rate)
    train(config)
    mixed = dataclasses.replace(config, output_dir=str(tmp_path / "mixed"))
    train(dataclasses.replace(mixed, max_steps=3, compile=True))
    train(mixed)
    torch._dynamo.reset()
    assert losses(mixed) == pytest.approx(losses(config), rel=1e-5)
    compiled, eager = (losses(run, kind="eval") for run in (mixed, config))
    assert [compiled[0], compiled[-1]] == pytest.approx([eager[0], eager[-1]], rel=1e-5)


def test_fsdp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compile and fsdp are both true"):
        toy_config(tmp_path, compile=True, fsdp=True)


def test_a_missing_compiler_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    config = toy_config(tmp_path, compile=True)
    torch._dynamo.reset()
    no_compiler = inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})
    with (
        fresh_cache(),
        no_compiler,
        pytest.raises(ConfigError, match=r"compile is true, but torch\.compile fails"),
    ):
        check_inputs(config)
    torch._dynamo.reset()
