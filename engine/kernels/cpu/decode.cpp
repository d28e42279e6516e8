// One decode step of a Llama-family model in bf16 on a CPU: every row is one token of one sequence.
//
// Why it exists: at one row a step is bound by reading the weights once, and calling some twenty tensor operations per
// layer costs half as much again. Same mathematics as engine/models/llama.py, which is its reference in the tests;
// sums are kept in fp32 and rounded to bf16 where a tensor would be stored. Plain C interface, no torch headers.
//
// Weights are packed [out / 16][in / 2][16][2]: one 64-byte load holds two inputs of sixteen outputs.

#include <memory>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "vectors.h"

constexpr int64_t kPage = 16;

struct Linear {
    const uint32_t* weight;
    const bf16* bias;  // or null
    int64_t out, in;
};

struct Layer {
    Linear qkv, o, gate_up, down;
    const bf16 *norm, *mlp_norm, *q_norm, *k_norm;  // the last two or null
    int64_t window;                                 // 0 = none
};

struct Model {
    int64_t hidden, heads, kv_heads, dim, inner, layers;
    float eps, scale;
    const bf16 *embed, *cos, *sin, *norm;  // cos, sin: [positions, dim], the sine's sign folded in
    Linear head;
    const Layer* layer;
    bf16* pool;  // [page, kv_head, layer, 2, 16, dim]
};

static inline float largest(v16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

// acc += two products per lane
static inline v16 dot2(v16 acc, u16x a, u16x b) {
#ifdef __AVX512BF16__
    return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
    acc += (v16)(a << 16) * (v16)(b << 16);
    return acc + (v16)(a & 0xffff0000u) * (v16)(b & 0xffff0000u);
#endif
}

static inline u16x words(const void* p) {
    u16x x;
    memcpy(&x, p, sizeof x);
    return x;
}

// y = x * rsqrt(mean(x^2) + eps) * weight
static void rms_norm(const bf16* x, const bf16* weight, bf16* y, int64_t width, float eps) {
    v16 squares{};
    for (int64_t i = 0; i < width; i += 16) {
        v16 v = load(x + i);
        squares += v * v;
    }
    v16 r = splat(1.0f / std::sqrt(sum(squares) / (float)width + eps));
    for (int64_t i = 0; i < width; i += 16) store(y + i, load(x + i) * r * load(weight + i));
}

// Loads ahead of use, by measurement: weights come from memory once and the hardware's own prefetch is too short.
template <int R>
constexpr int64_t kAhead = R == 1 ? 16 : 64;

enum class Out { plain, add, fp32 };

template <int R, int B, Out kind>
static void tile(const bf16* x, const Linear& l, int64_t block, void* out) {
    v16 acc[R][B];
    for (auto& row : acc)
        for (auto& a : row) a = v16{};
    const int64_t pairs = l.in / 2;
    const uint32_t* w = l.weight + block * pairs * 16;
    for (int64_t k = 0; k < pairs; k++) {
        u16x weights[B];
        for (int b = 0; b < B; b++) {
            weights[b] = words(w + (b * pairs + k) * 16);
            __builtin_prefetch(w + (b * pairs + k + kAhead<R>) * 16);
        }
        for (int r = 0; r < R; r++) {
            uint32_t two;
            memcpy(&two, x + r * l.in + 2 * k, 4);
            u16x inputs = two - u16x{};
            for (int b = 0; b < B; b++) acc[r][b] = dot2(acc[r][b], weights[b], inputs);
        }
    }
    for (int b = 0; b < B; b++) {
        const int64_t n = (block + b) * 16;
        const int64_t valid = l.out - n < 16 ? l.out - n : 16;
        for (int r = 0; r < R; r++) {
            v16 v = acc[r][b];
            if (l.bias) v += load(l.bias + n);
            if (kind == Out::fp32) {
                memcpy((float*)out + r * l.out + n, &v, valid * sizeof(float));
                continue;
            }
            bf16* y = (bf16*)out + r * l.out + n;
            if (kind == Out::add) v += load(y);
            store(y, v);
        }
    }
}

template <int B, Out kind>
static void rows_of(const bf16* x, const Linear& l, int64_t rows, int64_t block, void* out) {
    const int64_t size = kind == Out::fp32 ? 4 : 2;
    int64_t r = 0;
    auto at = [&](int64_t row) { return (void*)((char*)out + row * l.out * size); };
    for (; r + 8 <= rows; r += 8) tile<8, (B > 2 ? 2 : B), kind>(x + r * l.in, l, block, at(r));
    if (rows - r >= 4) tile<4, (B > 2 ? 2 : B), kind>(x + r * l.in, l, block, at(r)), r += 4;
    for (; r < rows; r++) tile<1, (B > 2 ? 2 : B), kind>(x + r * l.in, l, block, at(r));
}

// out [rows, l.out] = x [rows, l.in] Wt + b, or added to what is there. Called by all threads together.
template <Out kind>
static void linear(const bf16* x, const Linear& l, int64_t rows, void* out) {
    const int64_t blocks = (l.out + 15) / 16;
    if (rows == 1) {
#pragma omp for schedule(static)
        for (int64_t g = 0; g < blocks / 4; g++) tile<1, 4, kind>(x, l, g * 4, out);
#pragma omp single
        for (int64_t b = blocks / 4 * 4; b < blocks; b++) tile<1, 1, kind>(x, l, b, out);
        return;
    }
#pragma omp for schedule(static)
    for (int64_t g = 0; g < blocks / 2; g++) rows_of<2, kind>(x, l, rows, g * 2, out);
#pragma omp single
    if (blocks % 2) rows_of<1, kind>(x, l, rows, blocks - 1, out);
}

static void rotate(const bf16* x, const bf16* cos, const bf16* sin, bf16* y, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < dim; i += 16) {
        v16 other = load(x + (i < half ? i + half : i - half));
        store(y + i, load(x + i) * load(cos + i) + other * load(sin + i));
    }
}

// Rotates q into place and stores k and v at their page. One row.
static void place(const Model& m, const Layer& l, int64_t layer, bf16* qkv, int64_t position, int64_t page) {
    const bf16 *cos = m.cos + position * m.dim, *sin = m.sin + position * m.dim;
    std::vector<bf16> head(m.dim);
    for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
        bf16* x = qkv + h * m.dim;
        const bool key = h >= m.heads;
        if (l.q_norm)
            rms_norm(x, key ? l.k_norm : l.q_norm, head.data(), m.dim, m.eps);
        else
            memcpy(head.data(), x, m.dim * sizeof(bf16));
        rotate(head.data(), cos, sin, x, m.dim);
    }
    for (int64_t h = 0; h < m.kv_heads; h++) {
        bf16* cell = m.pool + (((page * m.kv_heads + h) * m.layers + layer) * 2 * kPage + position % kPage) * m.dim;
        memcpy(cell, qkv + (m.heads + h) * m.dim, m.dim * sizeof(bf16));
        memcpy(cell + kPage * m.dim, qkv + (m.heads + m.kv_heads + h) * m.dim, m.dim * sizeof(bf16));
    }
}

// Attention of G query heads that share a KV head: q [G, dim] -> out [G, dim]. scores: room for G * keys.
template <int G>
static void attend(const Model& m, int64_t layer, int64_t kv_head, const bf16* q, const int64_t* pages, int64_t low,
                   int64_t length, float* scores, bf16* out) {
    const int64_t first = low / kPage, last = (length + kPage - 1) / kPage, stride = (last - first) * kPage;
    auto cells = [&](int64_t p, int64_t which) {
        return m.pool + (((pages[p] * m.kv_heads + kv_head) * m.layers + layer) * 2 + which) * kPage * m.dim;
    };
    for (int64_t p = first; p < last; p++) {
        const bf16* keys = cells(p, 0);
        const bf16* next = p + 2 < last ? cells(p + 2, 0) : keys;  // pages lie anywhere: no hardware prefetch
        float* s = scores + (p - first) * kPage;
        for (int64_t t = 0; t < kPage; t++) {
            const int64_t at = p * kPage + t;
            if (at < low || at >= length) {
                for (int g = 0; g < G; g++) s[g * stride + t] = -INFINITY;
                continue;
            }
            for (int64_t d = 0; d < m.dim; d += 32) __builtin_prefetch(next + t * m.dim + d);
            v16 acc[G];
            for (auto& a : acc) a = v16{};
            for (int64_t d = 0; d < m.dim; d += 32) {
                u16x key = words(keys + t * m.dim + d);
                for (int g = 0; g < G; g++) acc[g] = dot2(acc[g], key, words(q + g * m.dim + d));
            }
            for (int g = 0; g < G; g++) s[g * stride + t] = sum(acc[g]) * m.scale;
        }
    }
    float total[G];
    for (int g = 0; g < G; g++) {
        float* s = scores + g * stride;
        v16 tops = splat(-INFINITY);
        for (int64_t i = 0; i < stride; i += 16) {
            v16 x;
            memcpy(&x, s + i, sizeof x);
            tops = x > tops ? x : tops;
        }
        const float top = largest(tops);
        v16 all{};
        for (int64_t i = 0; i < stride; i += 16) {
            v16 x;
            memcpy(&x, s + i, sizeof x);
            v16 e = exponential(x - top);  // 0 where it is hidden
            memcpy(s + i, &e, sizeof e);
            all += e;
        }
        total[g] = sum(all);
    }
    std::vector<v16> sums(G * m.dim / 16, v16{});
    for (int64_t p = first; p < last; p++) {
        const bf16* values = cells(p, 1);
        const bf16* next = p + 2 < last ? cells(p + 2, 1) : values;
        const int64_t begin = p * kPage < low ? low - p * kPage : 0;
        const int64_t end = length - p * kPage < kPage ? length - p * kPage : kPage;
        const float* s = scores + (p - first) * kPage;
        for (int64_t d = 0; d < m.dim; d += 32) {
            v16 acc[2][G];
            for (int i = 0; i < 2; i++)
                for (int g = 0; g < G; g++) acc[i][g] = sums[(d / 16 + i) * G + g];
            for (int64_t t = begin; t < end; t++) {
                __builtin_prefetch(next + t * m.dim + d);
                v16 v0 = load(values + t * m.dim + d), v1 = load(values + t * m.dim + d + 16);
                for (int g = 0; g < G; g++) {
                    acc[0][g] += v0 * s[g * stride + t];
                    acc[1][g] += v1 * s[g * stride + t];
                }
            }
            for (int i = 0; i < 2; i++)
                for (int g = 0; g < G; g++) sums[(d / 16 + i) * G + g] = acc[i][g];
        }
    }
    for (int64_t d = 0; d < m.dim; d += 16)
        for (int g = 0; g < G; g++) store(out + g * m.dim + d, sums[d / 16 * G + g] / total[g]);
}

static void attend_heads(const Model& m, const Layer& l, int64_t layer, int64_t kv_head, const bf16* q,
                         const int64_t* pages, int64_t length, bf16* out) {
    const int64_t group = m.heads / m.kv_heads;
    const int64_t low = l.window && length > l.window ? length - l.window : 0;
    std::unique_ptr<float[]> scores(new float[4 * (length + 2 * kPage)]);
    for (int64_t g = 0; g < group; g += 4) {
        const int64_t at = (kv_head * group + g) * m.dim;
        switch (group - g < 4 ? group - g : 4) {
            case 1: attend<1>(m, layer, kv_head, q + at, pages, low, length, scores.get(), out + at); break;
            case 2: attend<2>(m, layer, kv_head, q + at, pages, low, length, scores.get(), out + at); break;
            case 3: attend<3>(m, layer, kv_head, q + at, pages, low, length, scores.get(), out + at); break;
            default: attend<4>(m, layer, kv_head, q + at, pages, low, length, scores.get(), out + at);
        }
    }
}

// gated [inner] = silu(gate) * up, from gate_up [2 * inner]
static void gate(const bf16* gate_up, bf16* gated, int64_t inner) {
    for (int64_t i = 0; i < inner; i += 16) {
        store(gated + i, silu(load(gate_up + i)) * load(gate_up + inner + i));
    }
}

// tokens, positions [rows]; pages [rows, width]: each row's table up to its position. logits [rows, vocabulary] fp32.
extern "C" void pdserve_decode(const Model* model, int64_t rows, const int64_t* tokens, const int64_t* positions,
                               const int64_t* pages, int64_t width, float* logits, int64_t threads) {
    const Model& m = *model;
    const int64_t qkv_width = (m.heads + 2 * m.kv_heads) * m.dim, q_width = m.heads * m.dim;
    std::vector<bf16> h(rows * m.hidden), x(rows * m.hidden), qkv(rows * qkv_width), attended(rows * q_width),
        gate_up(rows * 2 * m.inner), gated(rows * m.inner);
    for (int64_t r = 0; r < rows; r++) memcpy(&h[r * m.hidden], m.embed + tokens[r] * m.hidden, m.hidden * sizeof(bf16));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        auto normed = [&](const bf16* weight) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) rms_norm(&h[r * m.hidden], weight, &x[r * m.hidden], m.hidden, m.eps);
        };
        for (int64_t i = 0; i < m.layers; i++) {
            const Layer& l = m.layer[i];
            normed(l.norm);
            linear<Out::plain>(x.data(), l.qkv, rows, qkv.data());
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                place(m, l, i, &qkv[r * qkv_width], positions[r], pages[r * width + positions[r] / kPage]);
#pragma omp for schedule(dynamic)
            for (int64_t j = 0; j < rows * m.kv_heads; j++) {
                const int64_t r = j / m.kv_heads;
                attend_heads(m, l, i, j % m.kv_heads, &qkv[r * qkv_width], pages + r * width, positions[r] + 1,
                             &attended[r * q_width]);
            }
            linear<Out::add>(attended.data(), l.o, rows, h.data());
            normed(l.mlp_norm);
            linear<Out::plain>(x.data(), l.gate_up, rows, gate_up.data());
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) gate(&gate_up[r * 2 * m.inner], &gated[r * m.inner], m.inner);
            linear<Out::add>(gated.data(), l.down, rows, h.data());
        }
        normed(m.norm);
        linear<Out::fp32>(x.data(), m.head, rows, logits);
    }
}
