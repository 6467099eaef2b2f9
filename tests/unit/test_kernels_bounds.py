"""The compiled kernels read and write nothing outside of their tensors: a page that may not be touched is on each side.

In a process of its own, which such a touch ends.
"""

from __future__ import annotations

import subprocess
import sys

from tests.unit.cpu_kernels import needs_kernels

GUARDED = """
import ctypes, itertools
import torch
from megatron_frozen import kernels
from megatron_frozen.kernels import passes

libc, PAGE = ctypes.CDLL(None), 4096
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def tensor(shape, stride, dtype=torch.bfloat16):
    numbers = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    num_bytes = numbers * dtype.itemsize
    room = -(-num_bytes // PAGE) * PAGE
    start = libc.mmap(None, room + 2 * PAGE, 0, 0x22, -1, 0) + PAGE  # private and anonymous, not to be touched
    libc.mprotect(start, room, 3)
    buffer = (ctypes.c_char * num_bytes).from_address(start + room - num_bytes if at_end else start)
    made = torch.frombuffer(buffer, dtype=dtype)
    return made.copy_(torch.randn(numbers).clamp_(-3, 3)).as_strided(shape, stride)

def dense(*shape, dtype=torch.bfloat16):
    return tensor(shape, torch.empty(shape, device="meta").stride(), dtype)

def products():
    for M, N, K in ((1, 1, 1), (1, 33, 2), (17, 1, 3), (65, 127, 31), (129, 15, 2049), (16, 300, 128), (257, 2, 16)):
        lefts = dense(M, K), dense(K, M).t(), tensor((M, K), (K + 5, 1)), tensor((M, K), (1, M + 3))
        rights = dense(K, N), dense(N, K).t(), tensor((K, N), (N + 5, 1)), tensor((K, N), (1, K + 1))
        for A, B in itertools.product(lefts, rights):
            kernels.multiply_into(tensor((M, N), (N + 1, 1), torch.float32), A, B, accumulate=True)

def attention():
    for b, n, k, s, d in ((1, 2, 1, 1, 2), (2, 2, 2, 65, 6), (1, 3, 1, 129, 22), (1, 4, 2, 130, 64), (2, 1, 1, 63, 66)):
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            sizes = [[(b, heads, s, d)[dim] for dim in order] for heads in (n, k, k, n)]
            query, key, value, grad = (dense(*size).permute(order) for size in sizes)
            guarded, kept = dense(*sizes[0]).permute(order), dense(b, n, s, dtype=torch.float32)
            for first_keys in (None, dense(b, s, dtype=torch.int32).copy_(torch.arange(s).sub(9).clamp(min=0))):
                context, logsumexp = kernels.attend(query, key, value, first_keys)
                given = guarded.copy_(context), kept.copy_(logsumexp), first_keys
                kernels.attend_backward(grad, query, key, value, *given)

def rows():
    for num_rows, width in itertools.product((1, 31, 33), (1, 15, 16, 17, 33, 100, 577, 2049)):
        x, grad, joint = dense(num_rows, width), dense(num_rows, width), dense(num_rows, 2 * width)
        weight = dense(width)
        _, inverse_rms = passes.rms_norm(x, weight, eps=1e-5)
        passes.rms_norm_backward(grad, x, weight, dense(num_rows, 1, dtype=torch.float32).copy_(inverse_rms))
        passes.gate(joint)
        passes.gate_backward(grad, joint)
        heads, tables = dense(num_rows, 2, 3, 2 * width), [dense(num_rows, 1, 1, part * width) for part in (2, 1)]
        passes.rotate(heads, *tables, sign=-1.0, out=dense(num_rows, 2, 3, 2 * width))
        top, total = passes.logsumexp(x)
        passes.softmax_gradient(x, top, total, torch.full((num_rows,), width - 1), total)
        passes.softmax_(x)
        for repeats in (1, 3, 33):
            passes.parts_of_sums(dense(num_rows, repeats, width), 2)
            passes.parts_of_sums(dense(repeats, num_rows, width).transpose(0, 1), 3)

for at_end, threads in itertools.product((True, False), (1, 2)):
    torch.set_num_threads(threads)
    products()
    attention()
    rows()
print("done")
"""


@needs_kernels
def test_nothing_outside_is_touched() -> None:
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", GUARDED], capture_output=True, text=True,
                          check=False, timeout=300)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
