// Passes over bf16 activations that torch makes in several, each with the roundings to bf16 that torch's have.
#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

constexpr long ROWS = 32;     // of a piece of work
constexpr long STRIP = 2048;  // columns of a piece, where rows are summed: long reads, sums in cache

struct Rows {  // [outer, inner, width], width dense
    bf16* at;
    long outer_stride, inner_stride;
};

struct Shape {
    long outer, inner, width;
    long num_rows() const { return outer * inner; }
    bf16* row(const Rows& rows, long i) const {
        return rows.at + i / inner * rows.outer_stride + i % inner * rows.inner_stride;
    }
};

template <class Work>
void each_row(const Torch& torch, unsigned num_threads, long count, const Work& work) {
    on_threads(torch, num_threads, (count + ROWS - 1) / ROWS, [&](Pieces& pieces) {
        for (long piece; pieces.take(piece);)
            for (long i = piece * ROWS; i < std::min(count, (piece + 1) * ROWS); i++) work(i);
    });
}

inline Floats in_bf16(Floats x) { return widened(rounded(x)); }
inline Floats sigmoid(Floats x) {
    return _mm512_div_ps(all(1), _mm512_add_ps(all(1), exp2(times(x, all(-LOG2_E)))));
}

// e^(x - below)
inline Floats exponential(Floats x, float below) { return exp2(times(_mm512_sub_ps(x, all(below)), all(LOG2_E))); }

float highest(const bf16* row, long width) {
    const Floats low = all(-std::numeric_limits<float>::infinity());
    Floats top = low;
    each_vector(width, [&](long j, __mmask16 mask) {
        top = _mm512_max_ps(top, _mm512_mask_mov_ps(low, mask, load(row + j, mask)));
    });
    return _mm512_reduce_max_ps(top);
}

// Calls keep(j, mask, exponentials) for each vector.
template <class Keep>
float sum_of_exponentials(const bf16* row, long width, float below, const Keep& keep) {
    Floats total = _mm512_setzero_ps();
    each_vector(width, [&](long j, __mmask16 mask) {
        Floats e = exponential(load(row + j, mask), below);
        keep(j, mask, e);
        total = _mm512_mask_add_ps(total, mask, total, e);
    });
    return _mm512_reduce_add_ps(total);
}

}  // namespace

extern "C" {

// y = weight * round(x r), r = 1 / sqrt(mean(x^2) + eps), which is kept.
void mf_rms_norm(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows, const bf16* weight,
                 float* inverse_rms, float eps) {
    const Shape& shape = *shape_;
    each_row(*torch, num_threads, shape.num_rows(), [&](long i) {
        const bf16* x = shape.row(rows[0], i);
        bf16* y = shape.row(rows[1], i);
        Floats sum = _mm512_setzero_ps();
        each_vector(shape.width, [&](long j, __mmask16 mask) {
            Floats v = load(x + j, mask);
            sum = _mm512_fmadd_ps(v, v, sum);
        });
        const float r = 1 / std::sqrt(_mm512_reduce_add_ps(sum) / shape.width + eps);
        inverse_rms[i] = r;
        each_vector(shape.width, [&](long j, __mmask16 mask) {
            store(y + j, times(in_bf16(times(load(x + j, mask), all(r))), load(weight + j, mask)), mask);
        });
    });
}

// dx = r g - x r^3 sum(g x) / width with g = round(dy weight).
void mf_rms_norm_backward(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows,
                          const bf16* weight, const float* inverse_rms) {
    const Shape& shape = *shape_;
    each_row(*torch, num_threads, shape.num_rows(), [&](long i) {
        const bf16 *x = shape.row(rows[0], i), *dy = shape.row(rows[1], i);
        bf16* dx = shape.row(rows[2], i);
        auto scaled = [&](long j, __mmask16 mask) {
            return in_bf16(times(load(dy + j, mask), load(weight + j, mask)));
        };
        Floats sum = _mm512_setzero_ps();
        each_vector(shape.width, [&](long j, __mmask16 mask) {
            sum = _mm512_fmadd_ps(scaled(j, mask), load(x + j, mask), sum);
        });
        const float r = inverse_rms[i], pull = -_mm512_reduce_add_ps(sum) * r * r * r / shape.width;
        each_vector(shape.width, [&](long j, __mmask16 mask) {
            store(dx + j, _mm512_fmadd_ps(load(x + j, mask), all(pull), times(scaled(j, mask), all(r))), mask);
        });
    });
}

// y = round(silu(gate)) up, of rows [gate, up]; width is one half's.
void mf_gate(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows) {
    const Shape& shape = *shape_;
    each_row(*torch, num_threads, shape.num_rows(), [&](long i) {
        const bf16 *gate = shape.row(rows[0], i), *up = gate + shape.width;
        bf16* y = shape.row(rows[1], i);
        each_vector(shape.width, [&](long j, __mmask16 mask) {
            Floats g = load(gate + j, mask);
            store(y + j, times(in_bf16(times(g, sigmoid(g))), load(up + j, mask)), mask);
        });
    });
}

// The gradients of gate and of up, beside each other as these are.
void mf_gate_backward(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows) {
    const Shape& shape = *shape_;
    each_row(*torch, num_threads, shape.num_rows(), [&](long i) {
        const bf16 *gate = shape.row(rows[0], i), *up = gate + shape.width, *dy = shape.row(rows[1], i);
        bf16 *grad_gate = shape.row(rows[2], i), *grad_up = grad_gate + shape.width;
        each_vector(shape.width, [&](long j, __mmask16 mask) {
            Floats g = load(gate + j, mask), d = load(dy + j, mask), s = sigmoid(g);
            Floats slope = times(s, _mm512_fmadd_ps(g, _mm512_sub_ps(all(1), s), all(1)));
            store(grad_up + j, times(in_bf16(times(g, s)), d), mask);
            store(grad_gate + j, times(in_bf16(times(d, load(up + j, mask))), slope), mask);
        });
    });
}

// Rotates the pairs (i, i + half) of heads [outer, inner, heads, 2 half] by angles, of which cos and sin are rows
// [half] or more; a `sign` of -1 turns them back.
void mf_rotate(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows, long num_heads,
               const long* head_strides, float sign) {
    const Shape& shape = *shape_;
    const long half = shape.width / 2;
    each_row(*torch, num_threads, shape.num_rows(), [&](long i) {
        const bf16 *cos = shape.row(rows[2], i), *sin = shape.row(rows[3], i);
        for (long h = 0; h < num_heads; h++) {
            const bf16* x = shape.row(rows[0], i) + h * head_strides[0];
            bf16* y = shape.row(rows[1], i) + h * head_strides[1];
            each_vector(half, [&](long j, __mmask16 mask) {
                Floats a = load(x + j, mask), b = load(x + half + j, mask);
                Floats c = load(cos + j, mask), s = times(load(sin + j, mask), all(sign));
                store(y + j, _mm512_fnmadd_ps(b, s, in_bf16(times(a, c))), mask);
                store(y + half + j, _mm512_fmadd_ps(a, s, in_bf16(times(b, c))), mask);
            });
        }
    });
}

// Turns each row of logits into its softmax, in place, and gives its maximum and its sum of exponentials below that.
void mf_softmax(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows, float* maximum,
                float* sum) {
    const Shape& shape = *shape_;
    on_threads(*torch, num_threads, shape.num_rows(), [&](Pieces& pieces) {
        const Room<float> exponentials(shape.width);
        for (long i; pieces.take(i);) {
            bf16* row = shape.row(*rows, i);
            maximum[i] = highest(row, shape.width);
            sum[i] = sum_of_exponentials(row, shape.width, maximum[i], [&](long j, __mmask16 mask, Floats e) {
                _mm512_mask_storeu_ps(exponentials + j, mask, e);
            });
            const Floats factor = all(1 / sum[i]);
            each_vector(shape.width, [&](long j, __mmask16 mask) {
                store(row + j, times(_mm512_maskz_loadu_ps(mask, exponentials + j), factor), mask);
            });
        }
    });
}

// Gives each row's maximum, not below the lowest number, and its sum of exponentials below that.
void mf_logsumexp(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows, float* maximum,
                  float* sum) {
    const Shape& shape = *shape_;
    on_threads(*torch, num_threads, shape.num_rows(), [&](Pieces& pieces) {
        for (long i; pieces.take(i);) {
            const bf16* row = shape.row(*rows, i);
            maximum[i] = std::max(highest(row, shape.width), std::numeric_limits<float>::lowest());
            sum[i] = sum_of_exponentials(row, shape.width, maximum[i], [](long, __mmask16, Floats) {});
        }
    });
}

// grad = exp(logits - maximum) factor, 0 in rows whose factor is 0, and at one column of each row what is given for it.
void mf_softmax_gradient(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows,
                         const float* maximum, const float* factor, const int64_t* column, const float* at_column) {
    const Shape& shape = *shape_;
    on_threads(*torch, num_threads, shape.num_rows(), [&](Pieces& pieces) {
        for (long i; pieces.take(i);) {
            const bf16* row = shape.row(rows[0], i);
            bf16* grad = shape.row(rows[1], i);
            const Floats scale = all(factor[i]);
            const __mmask16 is_kept = factor[i] == 0 ? 0 : 0xffff;
            each_vector(shape.width, [&](long j, __mmask16 mask) {
                Floats e = exponential(load(row + j, mask), maximum[i]);
                store(grad + j, _mm512_maskz_mul_ps(is_kept, e, scale), mask);
            });
            store(grad + column[i], all(at_column[i]), first(1));
        }
    });
}

// Sums rows [outer, inner, width] over inner, in fp32, and cuts the sums [outer, width] into parts
// [num_parts, outer, width] in bf16, each the rounding of what those before it left over.
void mf_parts_of_sums(const Torch* torch, unsigned num_threads, const Shape* shape_, const Rows* rows, bf16* parts,
                      long num_parts) {
    const Shape& shape = *shape_;
    const long strips = (shape.width + STRIP - 1) / STRIP;
    // Rows added before their sum joins the total: about sqrt(inner), so that roundings add up over 2 sqrt(inner) only.
    const long group = std::max(ROWS, std::lround(std::sqrt(shape.inner)));
    on_threads(*torch, num_threads, shape.outer * strips, [&](Pieces& pieces) {
        Floats sums[STRIP / LANES], some[STRIP / LANES];
        for (long piece; pieces.take(piece);) {
            const long i = piece / strips, start = piece % strips * STRIP, width = std::min(STRIP, shape.width - start);
            const bf16* x = rows->at + i * rows->outer_stride + start;
            std::fill_n(sums, (width + LANES - 1) / LANES, _mm512_setzero_ps());
            for (long k = 0; k < shape.inner;) {
                std::fill_n(some, (width + LANES - 1) / LANES, _mm512_setzero_ps());
                for (const long end = std::min(shape.inner, k + group); k < end; k++)
                    each_vector(width, [&](long j, __mmask16 mask) {
                        const bf16* at = x + k * rows->inner_stride + j;
                        _mm_prefetch(at + rows->inner_stride, _MM_HINT_T0);  // the next row's
                        some[j / LANES] = _mm512_add_ps(some[j / LANES], load(at, mask));
                    });
                each_vector(width, [&](long j, __mmask16) {
                    sums[j / LANES] = _mm512_add_ps(sums[j / LANES], some[j / LANES]);
                });
            }
            bf16* part = parts + i * shape.width + start;
            for (long p = 0; p < num_parts; p++, part += shape.outer * shape.width)
                each_vector(width, [&](long j, __mmask16 mask) {
                    Floats& rest = sums[j / LANES];
                    store(part + j, rest, mask);
                    rest = _mm512_sub_ps(rest, in_bf16(rest));
                });
        }
    });
}
}
