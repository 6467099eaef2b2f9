// Sixteen floats at a time, in AVX-512 with its bf16 conversions.
#pragma once
#include <immintrin.h>

#include <initializer_list>

#include "torch_library.h"

constexpr long LANES = 16;
constexpr float LOG2_E = 1.44269504f;
using Floats = __m512;

inline __mmask16 first(long count) { return count >= LANES ? 0xffff : (1u << count) - 1; }

// Calls work(j, mask) for each vector of a row.
template <class Work>
inline void each_vector(long width, const Work& work) {
    for (long j = 0; j < width; j += LANES) work(j, first(width - j));
}

inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
// Which the compiler does not fuse with a sum.
inline Floats rounded_product(Floats a, Floats b) {
    return _mm512_mul_round_ps(a, b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Floats widened(__m256i low) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16)); }
inline Floats load(const bf16* at, __mmask16 mask) { return widened(_mm256_maskz_loadu_epi16(mask, at)); }

// To the nearest, ties to even; NaN stays NaN, and what is below 2^-126 becomes 0, as in the products of bf16.
inline __m256i rounded(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store(bf16* at, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), rounded(x)); }
inline void store(bf16* at, Floats x, __mmask16 mask) { _mm256_mask_storeu_epi16(at, mask, rounded(x)); }

// Two rows interleaved, as the block product wants its right operand.
inline void store_pairs(bf16* at, __m256i even, __m256i odd, __mmask16 mask = 0xffff) {
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
    _mm512_mask_storeu_epi32(at, mask, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
}

// Rows [count, width] so interleaved, [count / 2, width, 2]; an odd last one with zero.
inline void interleave(const bf16* rows, long stride, bf16* into, long count, long width) {
    for (long i = 0; i < count; i += 2)
        each_vector(width, [&](long j, __mmask16 mask) {
            const bf16* at = rows + i * stride + j;
            __m256i even = _mm256_maskz_loadu_epi16(mask, at);
            __m256i odd = i + 1 < count ? _mm256_maskz_loadu_epi16(mask, at + stride) : _mm256_setzero_si256();
            store_pairs(into + i * width + 2 * j, even, odd, mask);
        });
}

// 2^x to 2 units in the last place: x = n + f with |f| <= 1/2, and the Taylor series of 2^f.
inline Floats exp2(Floats x) {
    x = _mm512_max_ps(all(-1000), x);  // of -inf and NaN, in this order, NaN stays
    Floats n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats f = _mm512_sub_ps(x, n), sum = all(1.5252734e-5f);
    for (float term : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        sum = _mm512_fmadd_ps(sum, f, all(term));
    return _mm512_scalef_ps(sum, n);
}
