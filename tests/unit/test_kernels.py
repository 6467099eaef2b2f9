"""The compiled kernels: how they are made, what they say where they cannot be, and values in odd sizes and layouts."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from megatron_frozen import kernels
from megatron_frozen.kernels import available, build, call
from tests.unit.cpu_kernels import needs_kernels


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatron_frozen" / "kernels"


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_kernels
def test_they_are_compiled_once_and_kept_in_the_users_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build.library.__wrapped__(), ctypes.CDLL)
    (made,) = empty_cache.iterdir()
    assert made.name.startswith("kernels-")
    before = made.stat().st_mtime_ns
    monkeypatch.setenv("CXX", "/nonexistent")
    assert isinstance(build.library.__wrapped__(), ctypes.CDLL), "what is there needs no compiler"
    assert made.stat().st_mtime_ns == before


@needs_kernels
def test_what_a_crash_left_of_them_is_made_anew(tmp_path: Path) -> None:
    """In a process of its own: to load a file that is cut short or has holes ends it."""
    code = """
import os, sys
from pathlib import Path
from megatron_frozen.kernels.build import library

def made(name):
    os.environ["XDG_CACHE_HOME"] = str(folder / name)
    assert not isinstance(library.__wrapped__(), str), library.__wrapped__()
    (file,) = (folder / name / "megatron_frozen" / "kernels").iterdir()
    return file

folder = Path(sys.argv[1])
first = made("first")
content = first.read_bytes()
os.environ["CXX"] = f"{sys.argv[2]} {first}"
half = len(content) // 2
damages = [b"", b"no library", *(content[:size] for size in (300, 1000, half, len(content) - 1)),
           content[:half] + bytes(len(content) - half), content[:-40] + bytes(40)]
for number, damage in enumerate(damages):
    file = folder / str(number) / "megatron_frozen" / "kernels" / first.name
    file.parent.mkdir(parents=True)
    file.write_bytes(damage)
    assert made(str(number)) == file
    assert file.read_bytes()[:len(content)] == content, number
print(len(damages))
"""
    script = 'from=$1; while [ "$1" != -o ]; do shift; done; cp "$from" "$2"'
    copier = program(tmp_path / "copier", script)
    done = subprocess.run([sys.executable, "-c", code, tmp_path, copier], check=True, capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.stdout == "8\n"


def test_without_a_compiler_they_say_what_to_install(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(empty_cache))
    assert build.library.__wrapped__() == (
        "there is no C++ compiler here: install g++, or name one in the environment variable CXX"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'x.cpp:1: error: no such flag' >&2; exit 1", "x.cpp:1: error: no such flag"),
        ("exit 3", "returned non-zero exit status 3"),
        ("exit 0", "No such file or directory"),
        ("kill -9 $$", "died with <Signals.SIGKILL: 9>"),
        (r"printf '\377 error in no encoding\n' >&2; exit 1", "\ufffd error in no encoding"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "file too short"),
    ],
    ids=["refused", "silent", "makes nothing", "killed", "not text", "corrupt"],
)
def test_a_compiler_that_fails_leaves_no_half_made_file(
    script: str, reason: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shlex.quote(program(tmp_path / "a compiler", script))
    monkeypatch.setenv("CXX", compiler)
    found = build.library.__wrapped__()
    assert isinstance(found, str)
    assert found.startswith(f"the C++ compiler {compiler} made no kernels in {empty_cache}: ")
    assert reason in found
    assert list(empty_cache.iterdir()) == []


def test_a_compiler_that_is_no_command_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    found = build.library.__wrapped__()
    assert found == "the environment variable CXX is no command (No closing quotation): g++ 'unclosed"
    assert not empty_cache.exists()


@needs_kernels
def test_of_many_threads_of_many_processes_one_compiles(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    monkeypatch.setenv("CXX", program(tmp_path / "compiler", f'echo >> {tmp_path}/runs; exec {compiler} "$@"'))
    code = """
from concurrent.futures import ThreadPoolExecutor
from megatron_frozen import kernels

with ThreadPoolExecutor(4) as threads:
    assert list(threads.map(lambda _: kernels.absent(), range(4))) == [None] * 4
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "\n"
    assert len(list(empty_cache.iterdir())) == 1


def test_a_compiler_that_hangs_is_named(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", program(tmp_path / "compiler", "echo 'an error so far' >&2; exec sleep 60"))
    monkeypatch.setattr(build, "_LONGEST_S", 0.5)
    found = build.library.__wrapped__()
    assert isinstance(found, str)
    assert found.endswith("timed out after 0.5 seconds")
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/version")  # a file, also for root
    monkeypatch.setenv("CXX", "g++")  # which need not be there
    found = build.library.__wrapped__()
    assert isinstance(found, str)
    assert "made no kernels in /proc/version/megatron_frozen/kernels: " in found


TRANSFORMS = {
    "grad": torch.func.grad,
    "vmap": torch.vmap,
    "functionalize": torch.func.functionalize,
    "both": lambda function: torch.func.functionalize(torch.func.grad(function)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_at_work_neither_turns_the_trial_nor_lends_an_address(name: str) -> None:
    """What a kernel makes there is wrapped, also from tensors of outside, or stands at the address of nothing."""
    expected, outside = kernels.absent(), torch.ones(3)

    def function(x: Tensor) -> Tensor:
        assert available.absent.__wrapped__() == expected
        assert not kernels.in_memory(x)
        assert not kernels.in_memory(outside)
        return (x * x).sum()

    TRANSFORMS[name](function)(torch.ones(3, 3))
    assert kernels.in_memory(outside)


@pytest.mark.parametrize("surroundings", ["float64", "bfloat16", "device", "fake"])
def test_the_trial_does_not_depend_on_where_it_first_happens(surroundings: str) -> None:
    """A trial in another dtype or at an address of nothing crashed, or turned the backend off for good."""
    expected = kernels.absent()
    dtype = torch.get_default_dtype()
    mode = {"device": torch.device("meta"), "fake": FakeTensorMode()}.get(surroundings, contextlib.nullcontext())
    try:
        torch.set_default_dtype(getattr(torch, surroundings, dtype) if "float" in surroundings else dtype)
        with mode:
            assert available.absent.__wrapped__() == expected
    finally:
        torch.set_default_dtype(dtype)


def whole_numbers(rows: int, columns: int, *, by_columns: bool) -> Tensor:
    """Numbers whose products and sums fp32 holds exactly."""
    numbers = torch.randint(-3, 4, (columns, rows) if by_columns else (rows, columns)).bfloat16()
    return numbers.t() if by_columns else numbers


@needs_kernels
def test_products_are_exact_in_every_order_of_memory(num_threads: int) -> None:
    torch.manual_seed(num_threads)
    sizes = itertools.product((1, 3, 130, 300), (1, 2, 17, 128, 257), (1, 2, 7, 515, 2049))
    for (M, N, K), A_turned, B_turned in itertools.product(sizes, (False, True), (False, True)):
        A, B = whole_numbers(M, K, by_columns=A_turned), whole_numbers(K, N, by_columns=B_turned)
        out = torch.ones(M, N)
        kernels.multiply_into(out, A, B, accumulate=True)
        assert torch.equal(out, A.float() @ B.float() + 1), (M, N, K, A_turned, B_turned)


@needs_kernels
@pytest.mark.parametrize("K", [2, 3])
def test_products_of_expanded_and_strided_operands_beside_other_memory(K: int) -> None:
    torch.manual_seed(0)
    ones = whole_numbers(1, K, by_columns=False)
    operands = [
        (ones.expand(5, K), whole_numbers(K, 4, by_columns=False)),
        (whole_numbers(5, 1, by_columns=True).expand(5, K), ones.t().expand(K, 4)),
        (whole_numbers(10, 3 * K, by_columns=False)[::2, ::3], whole_numbers(2 * K, 8, by_columns=True)[::2, ::2]),
        (torch.ones((), dtype=torch.bfloat16).expand(5, K), whole_numbers(K, 4, by_columns=True)),
    ]
    for A, B in operands:
        whole = torch.full((7, 9), 5.0)
        kernels.multiply_into(whole[1:6, 2:6], A, B, accumulate=False)
        expected = torch.full((7, 9), 5.0)
        expected[1:6, 2:6] = A.float() @ B.float()
        assert torch.equal(whole, expected)


@needs_kernels
def test_products_of_nothing() -> None:
    out = torch.full((3, 4), 7.0)
    empty = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(0, 4, dtype=torch.bfloat16)
    kernels.multiply_into(out, *empty, accumulate=True)
    assert torch.equal(out, torch.full((3, 4), 7.0))
    kernels.multiply_into(out, *empty, accumulate=False)
    assert torch.equal(out, torch.zeros(3, 4))
    kernels.multiply_into(torch.empty(0, 4), torch.empty(0, 2, dtype=torch.bfloat16),
                          torch.empty(2, 4, dtype=torch.bfloat16), accumulate=False)  # fmt: skip


@needs_kernels
def test_products_do_not_depend_on_the_number_of_threads(num_threads: int) -> None:
    torch.manual_seed(0)
    A, B = torch.randn(4100, 300).bfloat16().t(), torch.randn(4100, 200).bfloat16()
    out = torch.zeros(300, 200)
    kernels.multiply_into(out, A, B, accumulate=True)
    torch.set_num_threads(1)
    alone = torch.zeros(300, 200)
    kernels.multiply_into(alone, A, B, accumulate=True)
    assert torch.equal(out, alone), num_threads


@needs_kernels
def test_without_torchs_threads_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(call, "_PARALLEL", "no_such_function")
    monkeypatch.setattr(call, "_torch", call._torch.__wrapped__)
    assert call._torch()[-1] is None
    A, B = whole_numbers(1000, 64, by_columns=False), whole_numbers(64, 128, by_columns=False)
    out = torch.zeros(1000, 128)
    kernels.multiply_into(out, A, B, accumulate=False)
    assert torch.equal(out, A.float() @ B.float())


@needs_kernels
@pytest.mark.parametrize(("first", "second", "is_too_old"), [("avx512_core", "ALL", True), ("ALL", "AVX2", False)])
def test_an_instruction_set_that_onednn_is_held_to(
    first: str,
    second: str,
    is_too_old: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its block product ended the process."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", first)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", second)
    expected = "the environment holds oneDNN to avx512_core, which has no AVX512-BF16" if is_too_old else None
    assert available.absent.__wrapped__() == expected


@needs_kernels
def test_another_number_of_tokens_at_every_step_takes_no_more_memory() -> None:
    """Torch keeps a compiled kernel for each shape: one weight's gradients alone kept 0.7 GB after a thousand steps,
    and where they are stored transposed, so that tokens stand beside each other, 0.1 GB after 150.

    In a process of its own, as others' kernels may be kept already here.
    """
    code = """
import torch
from megatron_frozen import kernels

def resident():
    with open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[1]) * 4096 / 2**20

def step(num_tokens):
    grad, input_ = (torch.ones(num_tokens, width, dtype=torch.bfloat16) for width in (300, 200))
    kernels.multiply_into(torch.zeros(300, 200), grad.t(), input_, accumulate=True)
    kernels.multiply_into(torch.zeros(num_tokens, 200), grad, torch.ones(300, 200).bfloat16(), accumulate=False)
    transposed = torch.ones(300, num_tokens, dtype=torch.bfloat16)
    kernels.multiply_into(torch.zeros(300, 200), transposed, input_, accumulate=True)

torch.set_num_threads(1)
for num_tokens in (64, 254, 510, 511, 766, 1022, 2046, *range(256, 288, 2)):
    step(num_tokens)
before = resident()
for num_tokens in range(128, 1000, 6):
    step(num_tokens)
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert float(done.stdout) < 40


@needs_kernels
def test_rows_far_apart_are_packed() -> None:
    """The block product ends the process where rows of its left operand are 2^26 apart. Only pages used are there."""
    apart, (M, K) = 2**26, (40, 64)
    with mmap.mmap(-1, 2 * (apart * M + K), mmap.MAP_PRIVATE | 0x4000) as memory:  # MAP_NORESERVE
        far = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((M, K), (apart, 1))
        near, B, out = whole_numbers(M, K, by_columns=False), whole_numbers(K, 33, by_columns=False), torch.empty(M, 33)
        far.copy_(near)
        kernels.multiply_into(out, far, B, accumulate=False)
        del far
    assert torch.equal(out, near.float() @ B.float())
