// C[M, N] (+)= A[M, K] B[K, N] of bf16 into fp32, looped over torch's block product; see gemm/brgemm.py.
//
// Along K in chunks; per chunk one operand is packed whole and the other by the thread that multiplies it, while it is
// in its caches.
#include <algorithm>

#include "vectors.h"

namespace {

// BLOCK: rows or columns that a thread takes at a time; PANEL: columns of a packed right operand. Measured on
// AVX512-BF16: within 8% of the best of 512 to 2048, 128 to 512 and 32 to 256.
constexpr long CHUNK_K = 2048, BLOCK = 256, PANEL = 128;
constexpr long APART = 32;  // transposing into rows at powers of two took twice the time

struct Matrix {
    const bf16* at;
    long row_stride, column_stride;
    const bf16* operator()(long row, long column) const { return at + row * row_stride + column * column_stride; }
};

// Torch keeps a kernel for each shape and stride for good, some 0.4 MB on each thread, and the number of tokens differs
// from step to step; so all sizes that may hang on it are made of powers of two.
inline long power_within(long size, long most) {
    while (most > size) most /= 2;
    return most;
}
inline long power_above(long size) {
    long power = 1;
    while (power < size) power *= 2;
    return power;
}

// So it is with how far apart the rows of A are where they are read in place: the widths of a model are few, and more
// than a few distances are numbers of tokens.
inline bool is_one_of_few(long stride) {
    static std::atomic<long> few[8];
    for (auto& one : few) {
        long none = 0;
        if (one.compare_exchange_strong(none, stride) || none == stride) return true;
    }
    return false;
}

inline long even(long size) { return (size + 1) / 2 * 2; }

// Rows [M, K] of an A whose columns are dense, K padded to even with zero.
void pack_rows(const Torch& torch, const Matrix& A, bf16* into, long stride, long M, long K) {
    for (long m = 0; m < M; m += PANEL)
        torch.transpose_16(K, std::min(PANEL, M - m), A(m, 0), A.column_stride, into + m * stride, stride);
    if (K % 2)
        for (long m = 0; m < M; m++) into[m * stride + K] = 0;
}

// Panels [K / 2, PANEL, 2] of columns [N], the last one maybe narrower, side by side.
void pack_columns(const Torch& torch, const Matrix& B, bf16* into, long K, long N, bf16* turned) {
    for (long n = 0; n < N; n += PANEL) {
        long width = std::min(PANEL, N - n);
        const bf16* panel = B(0, n);
        bf16* at = into + n * even(K);
        if (B.column_stride == 1) {
            interleave(panel, B.row_stride, at, K, width);
        } else if (K % 2 == 0 && B.column_stride % 2 == 0) {  // pairs stand side by side already
            torch.transpose_32(width, K / 2, reinterpret_cast<const float*>(panel), B.column_stride / 2,
                               reinterpret_cast<float*>(at), width);
        } else {
            torch.transpose_16(width, K, panel, B.column_stride, turned, PANEL);
            interleave(turned, PANEL, at, K, width);
        }
    }
}

// Cuts a side into blocks of whole panels up to a limit, as many as keep all threads busy.
struct Cuts {
    Cuts(long size, long limit, unsigned num_threads) : size(size) {
        long blocks = (size + limit * num_threads - 1) / (limit * num_threads) * num_threads;
        block = ((size + blocks - 1) / blocks + PANEL - 1) / PANEL * PANEL;
    }
    long count() const { return (size + block - 1) / block; }
    long length(long index) const { return std::min(block, size - index * block); }
    long size, block;
};

// What is multiplied of one chunk along K, as blocks of rows of A and of columns of B.
struct Chunk {
    const Torch& torch;
    Matrix A, B;
    long M, N, depth, stride;  // stride: of packed rows of A
    bool is_A_readable;
    Cuts rows, columns;
    bool reads_A() const { return is_A_readable && depth % 2 == 0; }  // as it is
    long lda() const { return reads_A() ? A.row_stride : stride; }

    void pack_block_A(long index, bf16* into) const {
        const Matrix block{A(index * rows.block, 0), A.row_stride, A.column_stride};
        if (A.column_stride != 1) {
            pack_rows(torch, block, into, stride, rows.length(index), depth);
            return;
        }
        for (long m = 0; m < rows.length(index); m++) {
            std::copy_n(block(m, 0), depth, into + m * stride);
            if (depth % 2) into[m * stride + depth] = 0;
        }
    }
    void pack_block_B(long index, bf16* into, bf16* turned) const {
        const Matrix block{B(0, index * columns.block), B.row_stride, B.column_stride};
        pack_columns(torch, block, into, depth, columns.length(index), turned);
    }
    void multiply(const bf16* A_rows, const bf16* panels, float* C, long ldc, long num_rows, long num_columns,
                  bool adds) const {
        for (long m = 0, height; m < num_rows; m += height) {
            height = power_within(num_rows - m, BLOCK);
            for (long n = 0; n < num_columns; n += PANEL) {
                const long width = std::min(PANEL, num_columns - n);
                const bf16* panel = panels + n * even(depth);
                for (long k = 0, deep; k < even(depth); k += deep) {
                    deep = power_within(even(depth) - k, CHUNK_K);
                    torch.block(height, width, deep, lda(), width, ldc, adds || k > 0, A_rows + m * lda() + k,
                                panel + k * width, C + m * ldc + n, true);
                }
            }
        }
    }
};

}  // namespace

// Of A and of B one stride is 1. `adds`: to what C holds, which is written over otherwise.
extern "C" void mf_multiply(const Torch* torch, unsigned num_threads, long M, long N, long K, const Matrix* A,
                            const Matrix* B, float* C, long ldc, bool adds) {
    // So long that what is packed of the operand with the smaller side fills half of C.
    const long chunk = std::min(power_within(std::max({M, N, 512L}), CHUNK_K), K);
    const long stride = power_above(chunk) + APART;
    const Room<bf16> shared(std::min(M, N) * stride);
    // The block product aborts where rows of A are 2^26 apart.
    const bool is_A_readable = A->column_stride == 1 && A->row_stride >= K && A->row_stride < 1 << 22 && K > 1 &&
                               is_one_of_few(A->row_stride);
    for (long k = 0; k < K; k += chunk, adds = true) {
        const Chunk part{*torch, {(*A)(0, k), A->row_stride, A->column_stride},
                         {(*B)(k, 0), B->row_stride, B->column_stride}, M, N, std::min(chunk, K - k), stride,
                         is_A_readable, Cuts(M, BLOCK, num_threads), Cuts(N, BLOCK, num_threads)};
        const long depth = even(part.depth);
        if (M >= N) {  // all of B is packed first, then blocks of rows of A by the thread that multiplies them
            on_threads(*torch, num_threads, part.columns.count(), [&](Pieces& pieces) {
                const Room<bf16> turned(depth * PANEL);
                for (long i; pieces.take(i);) part.pack_block_B(i, shared + i * part.columns.block * depth, turned);
            });
            on_threads(*torch, num_threads, part.rows.count(), [&](Pieces& pieces) {
                const Room<bf16> own(part.reads_A() ? 0 : part.rows.block * stride);
                for (long i; pieces.take(i);) {
                    if (!part.reads_A()) part.pack_block_A(i, own);
                    const bf16* rows = part.reads_A() ? part.A(i * part.rows.block, 0) : own;
                    part.multiply(rows, shared, C + i * part.rows.block * ldc, ldc, part.rows.length(i), N, adds);
                }
            });
        } else {  // all of A, where it must be, then blocks of columns of B
            if (!part.reads_A())
                on_threads(*torch, num_threads, part.rows.count(), [&](Pieces& pieces) {
                    for (long i; pieces.take(i);) part.pack_block_A(i, shared + i * part.rows.block * stride);
                });
            on_threads(*torch, num_threads, part.columns.count(), [&](Pieces& pieces) {
                const Room<bf16> own(part.columns.block * depth), turned(depth * PANEL);
                for (long i; pieces.take(i);) {
                    part.pack_block_B(i, own, turned);
                    const bf16* rows = part.reads_A() ? part.A.at : shared;
                    part.multiply(rows, own, C + i * part.columns.block, ldc, M, part.columns.length(i), adds);
                }
            });
        }
    }
}
