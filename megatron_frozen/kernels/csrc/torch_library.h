// What these kernels use of torch's own CPU library: Python finds the functions by symbol and passes them in one table.
// And how they spread work over its threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>

using bf16 = uint16_t;  // the bits

struct Torch {
    // C[M, N] (+)= A[M, K] B[K, N]; fp32 C, bf16 A row-major, B with pairs of rows interleaved as [K / 2, N, 2]
    void (*block)(long M, long N, long K, long lda, long ldb, long ldc, bool adds, const bf16* A, const bf16* B,
                  float* C, bool packed);
    void (*release)(bool packed);  // gives the thread's tile registers back
    // [rows, columns] into [columns, rows]; row strides in elements
    void (*transpose_16)(long rows, long columns, const bf16* from, long from_stride, bf16* into, long into_stride);
    void (*transpose_32)(long rows, long columns, const float* from, long from_stride, float* into, long into_stride);
    // GNU OpenMP's, or null; torch's threads may still spin after their last operation, so others would lack processors
    void (*parallel)(void (*region)(void*), void* argument, unsigned num_threads, unsigned flags);
};

// Room that vectors and tiles read aligned. Too little memory ends the process: a thread has nobody to tell.
template <class T>
struct Room {
    explicit Room(long size) : at(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64))) {
        if (!at) std::abort();
    }
    ~Room() { std::free(at); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    operator T*() const { return at; }
    T* at;
};

// The next of `count` pieces of work, for whichever thread asks.
struct Pieces {
    explicit Pieces(long count) : count(count) {}
    bool take(long& piece) { return (piece = next++) < count; }
    std::atomic<long> next{0};
    long count;
};

// Runs work(pieces) on each thread, which takes pieces until none is left.
template <class Work>
void on_threads(const Torch& torch, unsigned num_threads, long count, const Work& work) {
    struct Region {
        const Torch& torch;
        const Work& work;
        Pieces pieces;
    } region{torch, work, Pieces(count)};
    auto run = [](void* argument) {
        auto& region = *static_cast<Region*>(argument);
        region.work(region.pieces);
        region.torch.release(true);
    };
    if (num_threads > count) num_threads = count;
    if (torch.parallel && num_threads > 1)
        torch.parallel(run, &region, num_threads, 0);
    else if (count > 0)
        run(&region);
}
