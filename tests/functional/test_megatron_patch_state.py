"""What the patch leaves behind where others patch too, and where several threads patch at once."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_frozen.errors import ConfigError
from megatron_frozen.integrations import megatron_core as integration
from megatron_frozen.integrations.megatron_core import patching

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Transformer Engine and apex being absent
    from megatron.core.tensor_parallel import layers

FROZEN, TRAINABLE = layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication


def methods() -> list[object]:
    return [vars(kind)[name] for kind in (FROZEN, TRAINABLE) for name in ("forward", "backward")]


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Whatever a test does, megatron-core is its own after it."""
    before = methods()
    yield
    integration.unpatch()
    assert all(now is then for now, then in zip(methods(), before, strict=True))
    assert not layers._grad_accum_fusion_available


def theirs(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Stand for somebody else's backward."""
    (weight,) = ctx.saved_tensors
    return grad_output.matmul(weight), None, None, None, None


def test_unpatching_does_not_take_away_what_others_put_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.patch()
    ours = methods()
    with monkeypatch.context() as on_top:
        on_top.setattr(FROZEN, "backward", staticmethod(theirs))
        with pytest.raises(ConfigError, match=r"Weight.backward has been replaced on top of this patch \(theirs in "):
            integration.unpatch()
        assert FROZEN.backward is theirs
        assert integration.is_patched()
    assert all(now is then for now, then in zip(methods(), ours, strict=True))


@pytest.mark.parametrize(
    "wrap",
    [lambda method: method, torch.amp.custom_bwd(device_type="cuda"), functools.wraps(FROZEN.backward)],
    ids=["plain", "custom_bwd", "wraps"],
)
def test_a_method_that_others_have_replaced_is_not_replaced_again(
    wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be lost without a word. Such is this patch itself after ``importlib.reload``."""
    monkeypatch.setattr(FROZEN, "backward", staticmethod(wrap(lambda *values: theirs(*values))))
    before = methods()
    with pytest.raises(ConfigError, match=r"another patch has replaced it and would be lost under this one"):
        integration.patch()
    assert methods() == before
    assert not integration.is_patched()


def in_thread(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_the_patch_is_on_until_the_last_of_two_bodies_ends() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with integration.patched():
            has_begun.set()
            may_end.wait(10)

    thread = in_thread(first)
    assert has_begun.wait(10)
    with integration.patched():
        may_end.set()
        thread.join(10)
        assert integration.is_patched()
    assert not integration.is_patched()


def test_a_patch_called_in_a_body_stays_after_it() -> None:
    with integration.patched():
        integration.patch()
    assert integration.is_patched()


def test_two_threads_patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second would keep the first one's methods for upstream's, and put them back."""
    meeting = threading.Barrier(2)
    patch_trainable = patching._patch_trainable

    def slowly(*values: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # alone here, as it should be
            meeting.wait(0.2)
        patch_trainable(*values)

    monkeypatch.setattr(patching, "_patch_trainable", slowly)
    for thread in [in_thread(integration.patch) for _ in range(2)]:
        thread.join(10)
    assert integration.is_patched()
    integration.unpatch()
    assert vars(FROZEN)["forward"].__func__.__module__ == layers.__name__
