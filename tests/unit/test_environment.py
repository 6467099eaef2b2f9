"""Environment variables: read late, and validated in words."""

from __future__ import annotations

import os

import pytest

from megatron_frozen import environment
from megatron_frozen.errors import ConfigError


def test_switch_takes_0_and_1_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_SWITCH", raising=False)
    assert environment.switch("MEGATRON_SWITCH") is False
    assert environment.switch("MEGATRON_SWITCH", default=True) is True
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("MEGATRON_SWITCH", value)
        assert environment.switch("MEGATRON_SWITCH") is expected
        assert environment.switch("MEGATRON_SWITCH", default=True) is (value != "0")
    for value in ("true", "2", " 1", "on"):
        monkeypatch.setenv("MEGATRON_SWITCH", value)
        with pytest.raises(ConfigError, match=f"environment variable MEGATRON_SWITCH is '{value}'; it takes 0 or 1"):
            environment.switch("MEGATRON_SWITCH")


def test_switch_names_are_those_of_megatron() -> None:
    assert environment.LINEAR_DGRAD_FP32 == "MEGATRON_TRUE_ON_POLICY_LINEAR_DGRAD_FP32"
    assert environment.DGRAD_ALLREDUCE_FP32 == "MEGATRON_TRUE_ON_POLICY_DGRAD_ALLREDUCE_FP32"


def test_launched_rank_is_torchruns_or_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert environment.launched_rank() == (0, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 8 and RANK is not set; start the ranks with torchrun"):
        environment.launched_rank()
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert environment.launched_rank() == (5, 8, 1)
    for world_size in ("0", "5"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(ConfigError, match=f"RANK is 5 and WORLD_SIZE {world_size}; a rank is below the number"):
            environment.launched_rank()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="environment variable WORLD_SIZE is 'two'; it takes a whole number"):
        environment.launched_rank()


def test_cache_home_is_xdgs_or_dot_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert environment.cache_home() == "/caches"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert environment.cache_home() == os.path.join("/home/someone", ".cache")
