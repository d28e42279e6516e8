// One decode step of latent attention on a CPU: the new cache row, absorbed queries, attention over the pages, values
// from the latents. And RMSNorm. The reference is the torch code of engine/kernels (mla.py, norms.py).
//
// Eight heads at a time: they share every cache row, so a row is loaded once for all of them.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kPage = 16, kHeads = 8;

constexpr int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

template <class T>
struct Latent {
    int64_t heads, plain, shared, latent, value;
    float eps, scale;
    const float* norm;      // [latent]
    const T *up_key, *up_value;  // [heads][plain][latent], [heads][value][latent]
    T* cache;               // [page][16][latent + shared], strided by page
    int64_t page_stride;

    int64_t width() const { return latent + shared; }
    T* row(int64_t page, int64_t token) const { return cache + page * page_stride + token * width(); }
};

// y = x / sqrt(mean x^2 + eps) * weight
template <class T>
void normalise(const T* x, const float* weight, int64_t width, float eps, T* y) {
    v16 squares{};
    for (int64_t i = 0; i < width; i += 16) {
        const v16 v = load(x + i, width - i);
        squares += v * v;
    }
    const float r = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += 16)
        store(y + i, load(x + i, width - i) * r * load(weight + i, width - i), width - i);
}

// Of one head: [q plain | q shared] -> [plain through up_key | shared], `latent` padded.
template <class T>
void absorb(const Latent<T>& l, int64_t head, const T* q, float* out) {
    const T* up = l.up_key + head * l.plain * l.latent;
    for (int64_t r = 0; r < l.latent; r += 64) {
        const int64_t vectors = std::min<int64_t>(4, (l.latent - r + 15) / 16);
        v16 acc[4] = {};
        for (int64_t n = 0; n < l.plain; n++) {
            const float input = load(q + n, 1)[0];
            for (int64_t i = 0; i < vectors; i++) {
                const int64_t at = r + i * 16;
                acc[i] += input * load(up + n * l.latent + at, l.latent - at);
            }
        }
        for (int64_t i = 0; i < vectors; i++) store(out + r + i * 16, acc[i], l.latent - r - i * 16);
    }
    for (int64_t i = 0; i < l.shared; i += 16) store(out + l.latent + i, load(q + l.plain + i, l.shared - i), l.shared - i);
}

// scores [tokens to a multiple of 2][8]: each token's with each head, scaled. q [8][padded width].
template <class T>
void score(const Latent<T>& l, const float* q, const int32_t* table, int64_t tokens, float* scores) {
    const int64_t width = l.width(), stride = padded(width);
    for (int64_t t = 0; t < tokens; t += 2) {
        const T* one = l.row(table[t / kPage], t % kPage);
        const T* two = t + 1 < tokens ? one + width : one;
        if (t + 8 < tokens) __builtin_prefetch(l.row(table[(t + 8) / kPage], (t + 8) % kPage));
        v16 acc[16] = {};
        for (int64_t d = 0; d < width; d += 16) {
            const v16 a = load(one + d, width - d), b = load(two + d, width - d);
            for (int64_t h = 0; h < kHeads; h++) {
                const v16 query = load(q + h * stride + d);
                acc[h] += query * a;
                acc[kHeads + h] += query * b;
            }
        }
        v16 found = sums(acc) * l.scale;
        if (t + 1 == tokens)
            for (int64_t h = 0; h < kHeads; h++) found[kHeads + h] = -INFINITY;
        store(scores + t * kHeads, found);
    }
}

// In place: e^(score - the head's largest). -> one over each head's sum [8].
void soften(float* scores, int64_t tokens, float* over) {
    v16 top = splat(-INFINITY), total{};
    for (int64_t t = 0; t < tokens; t += 2) {
        const v16 x = load(scores + t * kHeads);
        top = x > top ? x : top;
    }
    const v16 other = __builtin_shuffle(top, i16x{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    top = other > top ? other : top;
    for (int64_t t = 0; t < tokens; t += 2) {
        const v16 e = exponential(load(scores + t * kHeads) - top);
        store(scores + t * kHeads, e);
        total += e;
    }
    for (int64_t h = 0; h < kHeads; h++) over[h] = 1.0f / (total[h] + total[kHeads + h]);
}

// out [8][padded latent] = sum over tokens of weight * latent.
template <class T>
void gather(const Latent<T>& l, const float* weights, const float* over, const int32_t* table, int64_t tokens, float* out) {
    const int64_t stride = padded(l.latent);
    for (int64_t d = 0; d < l.latent; d += 32) {
        v16 acc[kHeads][2] = {};
        const int64_t left = l.latent - d;
        for (int64_t t = 0; t < tokens; t++) {
            const T* row = l.row(table[t / kPage], t % kPage) + d;
            const v16 a = load(row, left), b = left > 16 ? load(row + 16, left - 16) : v16{};
            for (int64_t h = 0; h < kHeads; h++) {
                acc[h][0] += weights[t * kHeads + h] * a;
                acc[h][1] += weights[t * kHeads + h] * b;
            }
        }
        for (int64_t h = 0; h < kHeads; h++) {
            store(out + h * stride + d, acc[h][0] * over[h]);
            if (left > 16) store(out + h * stride + d + 16, acc[h][1] * over[h]);
        }
    }
}

// y [value] = up_value of one head times its latent, which is padded by zeros.
template <class T>
void expand(const Latent<T>& l, int64_t head, const float* latent, T* y) {
    const T* up = l.up_value + head * l.value * l.latent;
    for (int64_t first = 0; first < l.value; first += 16) {
        const int64_t n = std::min<int64_t>(16, l.value - first);
        v16 acc[16] = {};
        for (int64_t i = 0; i < n; i++)
            for (int64_t r = 0; r < l.latent; r += 16)
                acc[i] += load(up + (first + i) * l.latent + r, l.latent - r) * load(latent + r);
        store(y + first, sums(acc), n);
    }
}

template <class T>
struct Rows {
    const T *q, *kv;  // kv: latent before its norm, then the shared part of the key
    int64_t q_stride, kv_stride;
    const int64_t* cells;    // page * 16 + offset of each row's own token
    const int32_t* tables;   // [rows][table_width]
    int64_t table_width;
    const int32_t* ends;     // known tokens of each row, its own included
    T* y;
    int64_t y_stride;
};

template <class T>
void run(const Latent<T>& l, const Rows<T>& rows, int64_t count, int64_t threads) {
    const int64_t wide = padded(l.width()), narrow = padded(l.latent), blocks = (l.heads + kHeads - 1) / kHeads;
    std::vector<float> q(count * blocks * kHeads * wide), seen(count * blocks * kHeads * narrow);
    for (int64_t b = 0; b < count; b++) {
        const T* kv = rows.kv + b * rows.kv_stride;
        T* row = l.row(rows.cells[b] / kPage, rows.cells[b] % kPage);
        normalise(kv, l.norm, l.latent, l.eps, row);
        memcpy(row + l.latent, kv + l.latent, l.shared * sizeof(T));
    }
    const int64_t heads = blocks * kHeads, size = l.plain + l.shared;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scores;
#pragma omp for schedule(static)
        for (int64_t h = 0; h < l.heads; h++)
            for (int64_t b = 0; b < count; b++)
                absorb(l, h, rows.q + b * rows.q_stride + h * size, &q[(b * heads + h) * wide]);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count * blocks; i++) {
            const int64_t b = i / blocks, tokens = rows.ends[b];
            const int32_t* table = rows.tables + b * rows.table_width;
            float over[kHeads];
            scores.resize(padded(tokens) * kHeads);
            score(l, &q[i * kHeads * wide], table, tokens, scores.data());
            soften(scores.data(), tokens, over);
            gather(l, scores.data(), over, table, tokens, &seen[i * kHeads * narrow]);
        }
#pragma omp for schedule(static)
        for (int64_t h = 0; h < l.heads; h++)
            for (int64_t b = 0; b < count; b++)
                expand(l, h, &seen[(b * heads + h) * narrow], rows.y + b * rows.y_stride + h * l.value);
    }
}

}  // namespace

extern "C" void pdserve_latent(const Latent<void>* layer, int64_t narrow, int64_t count, const Rows<void>* rows,
                               int64_t threads) {
    if (narrow)
        run(*(const Latent<bf16>*)layer, *(const Rows<bf16>*)rows, count, threads);
    else
        run(*(const Latent<float>*)layer, *(const Rows<float>*)rows, count, threads);
}

// y [rows][width] = rms_norm(x) * weight, rows of x and y so many elements apart.
extern "C" void pdserve_rms_norm(const void* x, int64_t x_stride, int64_t rows, int64_t width, const float* weight,
                                 float eps, void* y, int64_t y_stride, int64_t narrow, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * width > 65536)
    for (int64_t r = 0; r < rows; r++) {
        if (narrow)
            normalise((const bf16*)x + r * x_stride, weight, width, eps, (bf16*)y + r * y_stride);
        else
            normalise((const float*)x + r * x_stride, weight, width, eps, (float*)y + r * y_stride);
    }
}
