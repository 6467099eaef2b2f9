// Causal attention in blocks of BLOCK queries by BLOCK keys; see autograd/causal_attention.py for what is computed.
//
// A block of scores stands transposed, [keys, queries]: the maximum, the sum and every scale belong to a query, so all
// passes run along rows of queries with nothing to reduce inside a vector, P^T and dS^T are left operands as they are,
// and they become right operands while they are written. Blocks are padded with zeros, so that all products have one
// shape per head dim: the kernels behind them are made once for each. What a padded key would give is hidden as a later
// key is, and a padded query has a zero gradient.
//
// A query sees the keys from its own first one, as the start of its document, up to its own place. First keys never fall
// along a row, so that the blocks of keys that a block of queries needs are those from the first query's first key on.
//
// Shape letters: b = batch, n = query heads, k = key heads, g = n / k, s = sequence, d = head dim, L = BLOCK.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace {

constexpr long BLOCK = 128;

struct Heads {  // [batch, heads, s, d] with d dense
    bf16* at;
    long batch_stride, head_stride, row_stride;
    bf16* row(long b, long h, long i) const { return at + b * batch_stride + h * head_stride + i * row_stride; }
};

struct Sizes {
    long batch, num_heads, num_groups, length, dim;
    const int* first_keys;  // [batch, length], or null where all are 0
    long heads_per_group() const { return num_heads / num_groups; }
    long num_blocks() const { return (length + BLOCK - 1) / BLOCK; }
    long padded() const { return num_blocks() * BLOCK; }
    long whole() const { return padded() * dim; }
    // Some heads of a group: all that share a key head, or one alone where that keeps more threads busy.
    long heads_per_unit(unsigned num_threads) const {
        return batch * num_groups < 2 * static_cast<long>(num_threads) ? 1 : heads_per_group();
    }
};

struct Unit {
    long b, group, first_head, end_head;
    Unit(long index, const Sizes& sizes, long heads_per_unit) {
        long units = sizes.heads_per_group() / heads_per_unit;
        b = index / (sizes.num_groups * units);
        group = index / units % sizes.num_groups;
        first_head = group * sizes.heads_per_group() + index % units * heads_per_unit;
        end_head = first_head + heads_per_unit;
    }
};

// C[M, N] (+)= A[M, K] B[K, N], all dense, B as a right operand.
inline void multiply(const Torch& torch, long M, long N, long K, bool adds, const bf16* A, const bf16* B, float* C) {
    torch.block(M, N, K, K, N, N, adds, A, B, C, true);
}

// Dense rows [rows, d] of which those from `count` on are zero.
void copy_rows(const bf16* from, long stride, bf16* into, long count, long rows, long dim) {
    for (long i = 0; i < count; i++) std::memcpy(into + i * dim, from + i * stride, dim * sizeof(bf16));
    std::memset(into + count * dim, 0, (rows - count) * dim * sizeof(bf16));
}

// Rows [L, d] as a right operand over d: [d / 2, L, 2].
void pack_across(const Torch& torch, const bf16* rows, bf16* into, long dim) {
    torch.transpose_32(BLOCK, dim / 2, reinterpret_cast<const float*>(rows), dim / 2, reinterpret_cast<float*>(into),
                       BLOCK);
}

// Rows [L, d] as a right operand over the rows: [L / 2, d, 2].
void pack_down(const bf16* rows, bf16* into, long dim) { interleave(rows, dim, into, BLOCK, dim); }

// A block of rows [L, d], and as a right operand both ways.
struct Operand {
    Room<bf16> rows, across, down;
    explicit Operand(long tile) : rows(tile), across(tile), down(tile) {}
    void read(const Torch& torch, const bf16* from, long stride, long count, long dim) {
        copy_rows(from, stride, rows, count, BLOCK, dim);
        pack_across(torch, rows, across, dim);
        pack_down(rows, down, dim);
    }
};

// Each block of rows [s, d] transposed, [blocks, d, L].
void transpose_blocks(const Torch& torch, const bf16* rows, bf16* into, const Sizes& sizes) {
    for (long k = 0; k < sizes.num_blocks(); k++)
        torch.transpose_16(BLOCK, sizes.dim, rows + k * BLOCK * sizes.dim, sizes.dim, into + k * BLOCK * sizes.dim,
                           BLOCK);
}

// A row of fp32 times a factor.
void write_row(const float* row, float factor, bf16* into, long dim) {
    each_vector(dim, [&](long j, __mmask16 mask) {
        store(into + j, times(_mm512_maskz_loadu_ps(mask, row + j), all(factor)), mask);
    });
}

// Columns [d, L] of fp32, each times its query's factor, as the rows of a block of heads.
void write_columns(const Torch& torch, const float* columns, const float* factors, float* turned, bf16* into,
                   long stride, long count, long dim) {
    torch.transpose_32(dim, BLOCK, columns, BLOCK, turned, dim);
    for (long i = 0; i < count; i++) write_row(turned + i * dim, factors[i], into + i * stride, dim);
}

void write_rows(const float* rows, float factor, bf16* into, long stride, long count, long dim) {
    for (long i = 0; i < count; i++) write_row(rows + i * dim, factor, into + i * stride, dim);
}

// Columns [d, L], each times its query's factor, in place.
void scale_columns(float* columns, const float* factors, long dim) {
    for (long j = 0; j < BLOCK; j += LANES) {
        Floats factor = _mm512_loadu_ps(factors + j);
        for (long i = 0; i < dim; i++) {
            float* at = columns + i * BLOCK + j;
            _mm512_storeu_ps(at, times(_mm512_loadu_ps(at), factor));
        }
    }
}

// The sum over d of the products of two rows.
float dot(const bf16* a, const bf16* b, long dim) {
    Floats sum = _mm512_setzero_ps();
    each_vector(dim, [&](long j, __mmask16 mask) {
        sum = _mm512_fmadd_ps(load(a + j, mask), load(b + j, mask), sum);
    });
    return _mm512_reduce_add_ps(sum);
}

// Which keys of a block the queries of another see.
struct Sight {
    bool diagonal;          // the block of the queries themselves, with later keys in it
    const int* first_keys;  // [L], or null where no query's first key lies behind the block's first
    int start;              // of the block of keys
    bool is_partial() const { return diagonal || first_keys; }
    // Of the queries from column j on, those that see key i.
    __mmask16 operator()(long i, long j) const {
        __mmask16 mask = !diagonal || i <= j ? 0xffff : i - j >= LANES ? 0 : 0xffff << (i - j);
        if (first_keys)
            mask &= _mm512_cmple_epi32_mask(_mm512_loadu_si512(first_keys + j), _mm512_set1_epi32(start + i));
        return mask;
    }
};

// A block of queries of one row, and the blocks of keys that they need.
struct Queries {
    long start, count, first_block, last_block;
    int first_keys[BLOCK];  // of padded queries 0
    Queries(const Sizes& sizes, long b, long block)
        : start(block * BLOCK), count(std::min(BLOCK, sizes.length - start)), first_block(0), last_block(block),
          is_cut(sizes.first_keys) {
        if (!is_cut) return;
        const int* given = sizes.first_keys + b * sizes.length + start;
        for (long i = 0; i < BLOCK; i++) first_keys[i] = i < count ? given[i] : 0;
        first_block = std::min(static_cast<long>(first_keys[0]), start) / BLOCK;
    }
    Sight sight(long block) const {
        const bool cuts = is_cut && first_keys[count - 1] > block * BLOCK;
        return {block == last_block, cuts ? first_keys : nullptr, static_cast<int>(block * BLOCK)};
    }

  private:
    bool is_cut;  // there are first keys
};

// 2^(score scale - offset). A fused product keeps what rounding took from the offset: of large scores many powers of
// two, so that there both are rounded alike. Each query is asked for itself: its neighbours may be another document's.
inline Floats power(Floats score, Floats scale, Floats offset, __mmask16 large) {
    Floats exponent = _mm512_fmsub_ps(score, scale, offset);
    if (large) exponent = _mm512_mask_sub_ps(exponent, large, rounded_product(score, scale), offset);
    return exp2(exponent);
}
inline __mmask16 large_ones(Floats offset) {
    return _mm512_cmp_ps_mask(_mm512_abs_ps(offset), all(1 << 14), _CMP_NLT_UQ);
}

// One block of softmax: from scores [keys, queries] to P^T as a right operand, with the running maximum (of scaled
// scores) and sum of each query, and `decay`, by which what came from earlier blocks shrinks.
void softmax_block(const float* scores, float scale, const Sight& sees, float* maximum, float* sum, float* decay,
                   bf16* probs) {
    const bool partial = sees.is_partial();
    const Floats low = all(-std::numeric_limits<float>::infinity());
    for (long j = 0; j < BLOCK; j += LANES) {
        long end = sees.diagonal ? j + LANES : BLOCK;  // keys that some query of these sees
        Floats top = low;
        for (long i = 0; i < end; i++) {
            Floats x = _mm512_loadu_ps(scores + i * BLOCK + j);
            top = _mm512_max_ps(top, partial ? _mm512_mask_mov_ps(low, sees(i, j), x) : x);
        }
        Floats old = _mm512_loadu_ps(maximum + j), factor = all(scale);
        top = _mm512_max_ps(old, times(top, factor));
        const __mmask16 large = large_ones(top);
        Floats shrink = exp2(_mm512_sub_ps(old, top));
        Floats total = times(_mm512_loadu_ps(sum + j), shrink);
        for (long i = 0; i < BLOCK; i += 2) {
            __m256i pair[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (long odd = 0; odd < 2 && i < end; odd++) {
                Floats p = power(_mm512_loadu_ps(scores + (i + odd) * BLOCK + j), factor, top, large);
                if (partial) p = _mm512_maskz_mov_ps(sees(i + odd, j), p);
                total = _mm512_add_ps(total, p);
                pair[odd] = rounded(p);
            }
            store_pairs(probs + i * BLOCK + 2 * j, pair[0], pair[1]);
        }
        _mm512_storeu_ps(maximum + j, top);
        _mm512_storeu_ps(sum + j, total);
        _mm512_storeu_ps(decay + j, shrink);
    }
}

// One block of the backward: P^T and dS^T = P^T (dP^T - delta) as left operands, dS^T as a right operand too.
template <bool partial>
void softmax_backward_block(const float* scores, const float* grad_probs, float scale, const Sight& sees,
                            const float* logsumexp, const float* delta, bf16* probs, bf16* grad_scores,
                            bf16* grad_scores_right) {
    const Floats factor = all(scale);
    __mmask16 large[BLOCK / LANES];
    for (long j = 0; j < BLOCK; j += LANES) large[j / LANES] = large_ones(_mm512_loadu_ps(logsumexp + j));
    for (long i = 0; i < BLOCK; i += 2)
        for (long j = 0; j < BLOCK; j += LANES) {
            Floats offset = _mm512_loadu_ps(logsumexp + j), mean = _mm512_loadu_ps(delta + j);
            __m256i pair[2];
            for (long odd = 0; odd < 2; odd++) {
                long at = (i + odd) * BLOCK + j;
                Floats p = power(_mm512_loadu_ps(scores + at), factor, offset, large[j / LANES]);
                Floats ds = times(p, _mm512_sub_ps(_mm512_loadu_ps(grad_probs + at), mean));
                if (partial) {
                    p = _mm512_maskz_mov_ps(sees(i + odd, j), p);
                    ds = _mm512_maskz_mov_ps(sees(i + odd, j), ds);
                }
                store(probs + at, p);
                pair[odd] = rounded(ds);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_scores + at), pair[odd]);
            }
            store_pairs(grad_scores_right + i * BLOCK + 2 * j, pair[0], pair[1]);
        }
}

// What one thread of the backward holds: a key head, a block of queries that see it, and what their products need.
struct Backward {
    const Torch& torch;
    const Sizes& sizes;
    const Heads* heads;  // query, key, value, context and grad
    const float scale;
    const long dim, tile;
    Room<bf16> keys, keys_T, values;
    Operand queries, grads;
    Room<bf16> probs, grad_scores, grad_scores_right;
    Room<float> scores, grad_probs, columns, turned, per_query;
    float *logsumexp, *delta, *factors;

    Backward(const Torch& torch, const Sizes& sizes, const Heads* heads, float root)
        : torch(torch), sizes(sizes), heads(heads), scale(LOG2_E * root), dim(sizes.dim), tile(BLOCK * dim),
          keys(sizes.whole()), keys_T(sizes.whole()), values(sizes.whole()), queries(tile), grads(tile),
          probs(BLOCK * BLOCK), grad_scores(BLOCK * BLOCK), grad_scores_right(BLOCK * BLOCK), scores(BLOCK * BLOCK),
          grad_probs(BLOCK * BLOCK), columns(tile), turned(tile), per_query(3 * BLOCK), logsumexp(per_query),
          delta(per_query + BLOCK), factors(per_query + 2 * BLOCK) {
        for (long i = 0; i < BLOCK; i++) factors[i] = root;
    }

    void read_keys(long b, long group) {
        const Heads &key = heads[1], &value = heads[2];
        copy_rows(key.row(b, group, 0), key.row_stride, keys, sizes.length, sizes.padded(), dim);
        copy_rows(value.row(b, group, 0), value.row_stride, values, sizes.length, sizes.padded(), dim);
        transpose_blocks(torch, keys, keys_T, sizes);
    }

    void read_queries(long b, long h, const Queries& block, const float* given) {
        const Heads &query = heads[0], &context = heads[3], &grad = heads[4];
        const long start = block.start, count = block.count;
        queries.read(torch, query.row(b, h, start), query.row_stride, count, dim);
        grads.read(torch, grad.row(b, h, start), grad.row_stride, count, dim);
        for (long i = 0; i < BLOCK; i++) {
            delta[i] = i < count ? dot(grads.rows + i * dim, context.row(b, h, start + i), dim) : 0;
            logsumexp[i] = i < count ? given[i] : 0;
        }
    }

    // Over or to the gradients of block k of keys and values, and of these queries.
    void differentiate(const Queries& block, long k, bool adds, float* grad_K, float* grad_V) {
        multiply(torch, BLOCK, BLOCK, dim, false, keys + k * tile, queries.across, scores);      // S^T
        multiply(torch, BLOCK, BLOCK, dim, false, values + k * tile, grads.across, grad_probs);  // dP^T
        const Sight sees = block.sight(k);
        const auto softmax_backward = sees.is_partial() ? softmax_backward_block<true> : softmax_backward_block<false>;
        softmax_backward(scores, grad_probs, scale, sees, logsumexp, delta, probs, grad_scores, grad_scores_right);
        multiply(torch, BLOCK, dim, BLOCK, adds, probs, grads.down, grad_V + k * tile);
        multiply(torch, BLOCK, dim, BLOCK, adds, grad_scores, queries.down, grad_K + k * tile);
        multiply(torch, dim, BLOCK, BLOCK, k > block.first_block, keys_T + k * tile, grad_scores_right,
                 columns);  // dQ^T
    }

    void write_queries(const Heads& grad_query, long b, long h, long start, long count) {
        write_columns(torch, columns, factors, turned, grad_query.row(b, h, start), grad_query.row_stride, count, dim);
    }
};

}  // namespace

// Writes C, and the logarithm to base 2 of each query's sum of exponentials into [b, n, s].
extern "C" void mf_attention_forward(const Torch* torch_, unsigned num_threads, const Sizes* sizes_, const Heads* heads,
                                     float* logsumexp) {
    const Torch& torch = *torch_;
    const Sizes& sizes = *sizes_;
    const Heads &query = heads[0], &key = heads[1], &value = heads[2], &context = heads[3];
    const long dim = sizes.dim, tile = BLOCK * dim, per_unit = sizes.heads_per_unit(num_threads);
    const float scale = LOG2_E / std::sqrt(static_cast<float>(dim));
    on_threads(torch, num_threads, sizes.batch * sizes.num_heads / per_unit, [&](Pieces& pieces) {
        Room<bf16> keys(sizes.padded() * dim), values(sizes.padded() * dim), values_T(sizes.padded() * dim);
        Room<bf16> rows(tile), query_across(tile), probs(BLOCK * BLOCK);
        Room<float> scores(BLOCK * BLOCK), columns(tile), turned(tile), per_query(3 * BLOCK);
        float *maximum = per_query, *sum = per_query + BLOCK, *decay = per_query + 2 * BLOCK;
        for (long piece; pieces.take(piece);) {
            Unit unit(piece, sizes, per_unit);
            copy_rows(key.row(unit.b, unit.group, 0), key.row_stride, keys, sizes.length, sizes.padded(), dim);
            copy_rows(value.row(unit.b, unit.group, 0), value.row_stride, values, sizes.length, sizes.padded(), dim);
            transpose_blocks(torch, values, values_T, sizes);
            for (long h = unit.first_head; h < unit.end_head; h++)
                for (long q = 0; q < sizes.num_blocks(); q++) {
                    const Queries block(sizes, unit.b, q);
                    const long start = block.start, count = block.count;
                    copy_rows(query.row(unit.b, h, start), query.row_stride, rows, count, BLOCK, dim);
                    pack_across(torch, rows, query_across, dim);
                    for (long i = 0; i < BLOCK; i++) {
                        maximum[i] = std::numeric_limits<float>::lowest();  // a whole block of scores may be -inf
                        sum[i] = 0;
                    }
                    for (long k = block.first_block; k <= q; k++) {
                        const bool adds = k > block.first_block;
                        multiply(torch, BLOCK, BLOCK, dim, false, keys + k * tile, query_across, scores);  // S^T
                        softmax_block(scores, scale, block.sight(k), maximum, sum, decay, probs);
                        if (adds) scale_columns(columns, decay, dim);
                        multiply(torch, dim, BLOCK, BLOCK, adds, values_T + k * tile, probs, columns);  // C^T
                    }
                    float* out = logsumexp + (unit.b * sizes.num_heads + h) * sizes.length + start;
                    for (long i = 0; i < BLOCK; i++) {
                        if (i < count) out[i] = maximum[i] + std::log2(sum[i]);
                        decay[i] = 1 / sum[i];
                    }
                    write_columns(torch, columns, decay, turned, context.row(unit.b, h, start), context.row_stride,
                                  count, dim);
                }
        }
    });
}

// Writes dQ, dK and dV.
extern "C" void mf_attention_backward(const Torch* torch_, unsigned num_threads, const Sizes* sizes_,
                                      const Heads* heads, const float* logsumexp) {
    const Torch& torch = *torch_;
    const Sizes& sizes = *sizes_;
    const Heads &grad_query = heads[5], &grad_key = heads[6], &grad_value = heads[7];
    const long dim = sizes.dim, whole = sizes.whole(), per_unit = sizes.heads_per_unit(num_threads);
    const float root = 1 / std::sqrt(static_cast<float>(dim));
    auto write_grads = [&](const float* sums, long b, long group) {  // dK and dV of one key head, [2, padded s, d]
        write_rows(sums, root, grad_key.row(b, group, 0), grad_key.row_stride, sizes.length, dim);
        write_rows(sums + whole, 1, grad_value.row(b, group, 0), grad_value.row_stride, sizes.length, dim);
    };
    // Where units are heads that share a key head, each has sums of its own, [b, n, 2, padded s, d], added at the end.
    const bool shares = per_unit < sizes.heads_per_group();
    const Room<float> partial(shares ? 2 * sizes.batch * sizes.num_heads * whole : 0);
    on_threads(torch, num_threads, sizes.batch * sizes.num_heads / per_unit, [&](Pieces& pieces) {
        Backward backward(torch, sizes, heads, root);
        const Room<float> own(shares ? 0 : 2 * whole);
        for (long piece; pieces.take(piece);) {
            const Unit unit(piece, sizes, per_unit);
            float* sums = shares ? partial + 2 * (unit.b * sizes.num_heads + unit.first_head) * whole : own.at;
            backward.read_keys(unit.b, unit.group);
            for (long h = unit.first_head; h < unit.end_head; h++)
                for (long q = 0; q < sizes.num_blocks(); q++) {
                    const Queries block(sizes, unit.b, q);
                    backward.read_queries(unit.b, h, block,
                                          logsumexp + (unit.b * sizes.num_heads + h) * sizes.length + block.start);
                    for (long k = block.first_block; k <= q; k++) {
                        const bool adds = q > k || h > unit.first_head;  // a block of keys is first met on the diagonal
                        backward.differentiate(block, k, adds, sums, sums + whole);
                    }
                    backward.write_queries(grad_query, unit.b, h, block.start, block.count);
                }
            if (!shares) write_grads(own, unit.b, unit.group);
        }
    });
    if (!shares) return;
    on_threads(torch, num_threads, sizes.batch * sizes.num_groups, [&](Pieces& pieces) {
        for (long piece; pieces.take(piece);) {
            float* sums = partial + 2 * piece * sizes.heads_per_group() * whole;
            for (long h = 1; h < sizes.heads_per_group(); h++)
                for (long i = 0; i < 2 * whole; i++) sums[i] += sums[2 * h * whole + i];
            write_grads(sums, piece / sizes.num_groups, piece % sizes.num_groups);
        }
    });
}
