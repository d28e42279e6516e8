// One decode step of a layer with a recurrent state, on a CPU: convolutions, gates, state and output norm of every row
// in one pass over its slot. For Kimi Delta Attention, Gated DeltaNet and Mamba2 alike; the reference is the torch code
// of engine/kernels (conv_decode, the gates, delta_decode, gated_rms_norm), whose names are used here.
//
// Why it exists: as tensor operations it is some fifty calls a layer over a few kilobytes each. A row and its q/k head
// are computed alone, so nothing depends on what else is in the batch.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

enum Decay : int64_t { kSoftplus, kBounded, kStep };  // kStep: Mamba2's, whose step size takes the place of beta

// One sub-projection and its convolution window, [slot][unit][channels][width - 1] strided.
struct Part {
    const float *weight, *bias;  // [width][units * channels]; bias or null
    void* window;
    int64_t slot_stride, unit_stride, units, channels, column;  // column: of its first channel in the input
};

struct Layer {
    int64_t heads, key_heads, key_dim, value_dim, width;
    Part q, k, v;
    float* state;  // [slot][head][value][key] strided
    int64_t slot_stride, head_stride;
    int64_t decay, gate_dim;     // gate_dim: decay rates per head, key_dim or 1
    const float *rate, *dt_bias; // [heads] e^A_log; [heads][gate_dim]
    float low, high;             // kBounded: the bound; kStep: limits of the step size
    float scale;
    int64_t normalised, corrected;
    const float* skip;   // [heads] or null
    const float* norm;   // [value_dim], or [heads * value_dim] when the gate comes first
    float eps;
    int64_t sigmoid_gate, gate_first;
    float *ring_k, *ring_u, *ring_g;  // [slot][head][ring][key_dim, value_dim or gate_dim], or null
    int64_t ring, pre_decayed;
};

template <class T>
struct Rows {
    const T *x, *raw, *beta, *gate;
    int64_t x_stride, raw_stride, beta_stride, gate_stride;
    T* y;
    int64_t y_stride;
    const int64_t* held;  // records of each row before this token, or null: there are none and none is left
    const uint8_t* fold;  // whether they and the token go into the state
};

constexpr int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

struct Shuffles {
    i16x split[3][2], join[3][2];

    Shuffles() {
        for (int j = 0; j < 3; j++)
            for (int i = 0; i < 16; i++) {
                const int at = 3 * i + j, from = 16 * j + i;
                split[j][0][i] = at < 32 ? at : 0;
                split[j][1][i] = at < 32 ? i : at - 16;
                join[j][0][i] = from % 3 < 2 ? from / 3 + 16 * (from % 3) : 0;
                join[j][1][i] = from % 3 < 2 ? i : 16 + from / 3;
            }
    }
};
const Shuffles kShuffles;

// Three rows of sixteen channels, which lie channel by channel, and back with the oldest replaced by the newest.
template <class T>
inline void shift(T* window, v16 newest, v16* rows) {
    const v16 a = load(window), b = load(window + 16), c = load(window + 32);
    for (int j = 0; j < 3; j++)
        rows[j] = __builtin_shuffle(__builtin_shuffle(a, b, kShuffles.split[j][0]), c, kShuffles.split[j][1]);
    for (int j = 0; j < 3; j++)
        store(window + 16 * j,
              __builtin_shuffle(__builtin_shuffle(rows[1], rows[2], kShuffles.join[j][0]), newest, kShuffles.join[j][1]));
}

template <class T>
inline void shift_one(T* window, int64_t keep, const T* newest, float* rows) {
    for (int64_t j = 0; j < keep; j++) rows[j] = load(window + j, 1)[0];
    memmove(window, window + 1, (keep - 1) * sizeof(T));
    window[keep - 1] = *newest;
}

constexpr int64_t kRows = 16;  // of a window; at least one

// out [channels] = silu(convolution) of one unit of one row, whose window moves on. Slot 0 has no window.
template <class T>
void convolve(const Layer& l, const Part& p, int64_t slot, int64_t unit, const T* x, float* out) {
    const int64_t keep = l.width - 1, all = p.units * p.channels, first = unit * p.channels;
    T* window = (T*)p.window + slot * p.slot_stride + unit * p.unit_stride;
    for (int64_t c = 0; c < p.channels; c += 16) {
        const int64_t n = p.channels - c < 16 ? p.channels - c : 16;
        const T* input = x + p.column + first + c;
        const v16 newest = load(input, n);
        v16 rows[kRows] = {};
        if (slot && n == 16 && keep == 3) {
            shift(window + c * keep, newest, rows);
        } else if (slot) {
            for (int64_t i = 0; i < n; i++) {
                float one[kRows];
                shift_one(window + (c + i) * keep, keep, input + i, one);
                for (int64_t j = 0; j < keep; j++) rows[j][i] = one[j];
            }
        }
        v16 y = p.bias ? load(p.bias + first + c, n) : v16{};
        for (int64_t j = 0; j < keep; j++) y += rows[j] * load(p.weight + j * all + first + c, n);
        y += newest * load(p.weight + keep * all + first + c, n);
        store(out + c, as(input, silu(y)), n);
    }
}

inline float dot(const float* a, const float* b, int64_t n) {
    v16 total{};
    for (int64_t i = 0; i < n; i += 16) total += load(a + i) * load(b + i);
    return sum(total);
}

inline void scale_by(float* x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store(x + i, load(x + i) * factor);
}

// The decays a = e^g of one head and their logarithms, [gate_dim], and the step size where it is the gate that has it.
template <class T>
float decays(const Layer& l, int64_t head, const T* raw, float* a, float* logs) {
    float step = 0.0f;
    for (int64_t i = 0; i < l.gate_dim; i += 16) {
        const int64_t n = l.gate_dim - i, at = head * l.gate_dim + i;
        const v16 x = load(raw + at, n) + load(l.dt_bias + at, n);
        v16 g;
        if (l.decay == kBounded) {
            g = l.low * sigmoid(l.rate[head] * x);
        } else {
            v16 dt = softplus(x);
            if (l.decay == kStep) {
                dt = dt < l.low ? splat(l.low) : dt;
                dt = dt > l.high ? splat(l.high) : dt;
                step = dt[0];
            }
            g = -l.rate[head] * dt;
        }
        store(a + i, exponential(g), n);
        store(logs + i, g, n);
    }
    return step;
}

struct Read {
    const float *k, *q, *ka, *qa, *a;  // [key_dim], padded by zeros
    float dots, beta;
};

// u = beta (v - S (a o k)) or beta v;  out = S (a o q) + dots u;  S <- S diag(a) + u k^T. Sixteen rows of S at a time.
void advance(const Layer& l, const Read& r, float* state, const float* next, const float* v, float* out) {
    const int64_t K = l.key_dim;
    for (int64_t first = 0; first < l.value_dim; first += 16) {
        const int64_t n = l.value_dim - first < 16 ? l.value_dim - first : 16;
        float* s = state + first * K;
        const float* ahead = first + 16 < l.value_dim ? s + 16 * K : next;
        v16 seen[2][16] = {};
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < K; k += 16) {
                const v16 row = load(s + i * K + k, K - k);
                __builtin_prefetch(ahead + i * K + k, 1);
                seen[0][i] += row * load(r.ka + k);
                seen[1][i] += row * load(r.qa + k);
            }
        const v16 value = load(v + first, n);
        v16 u = r.beta * value;
        if (l.corrected) u -= r.beta * sums(seen[0]);
        store(out + first, sums(seen[1]) + r.dots * u, n);
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < K; k += 16)
                store(s + i * K + k, load(s + i * K + k, K - k) * load(r.a + k) + u[i] * load(r.k + k), K - k);
    }
}

// Of one slot and head: see engine/kernels/replay.py.
struct Records {
    float *k, *u, *g;
    int64_t held;
    bool fold;
};

inline v16 rates(const Layer& l, const float* g, int64_t i) {
    return l.gate_dim == 1 ? splat(g[0]) : load(g + i, l.key_dim - i);
}

// keys [held][padded key_dim] = each record's key, decayed up to now. -> the decay of the state since, in `since`.
void decayed(const Layer& l, const Records& r, float* keys, float* since) {
    const int64_t K = padded(l.key_dim);
    for (int64_t i = 0; i < K; i += 16) {
        const int64_t n = l.key_dim - i;
        v16 later = l.pre_decayed && r.held ? rates(l, r.g + (r.held - 1) * l.gate_dim, i) : v16{};
        for (int64_t j = r.held - 1; j >= 0; j--) {
            store(keys + j * K + i, load(r.k + j * l.key_dim + i, n) * exponential(later));
            if (!l.pre_decayed) later += rates(l, r.g + j * l.gate_dim, i);
        }
        store(since + i, exponential(later));
    }
}

// Keep the token as a record: logs [gate_dim] of its own decay, its key, and u, which is in its place already.
void keep(const Layer& l, const Records& r, const Read& read, const float* logs) {
    float *k = r.k + r.held * l.key_dim, *g = r.g + r.held * l.gate_dim;
    const float* last = l.pre_decayed && r.held ? g - l.gate_dim : nullptr;
    for (int64_t i = 0; i < l.gate_dim; i += 16) {
        const int64_t n = l.gate_dim - i;
        store(g + i, last ? load(logs + i, n) + load(last + i, n) : load(logs + i, n), n);
    }
    for (int64_t i = 0; i < l.key_dim; i += 16) {
        const v16 key = load(read.k + i);
        store(k + i, l.pre_decayed ? key * exponential(-rates(l, g, i)) : key, l.key_dim - i);
    }
}

// advance() of a state with records: S is what was folded last, and is written only where it is folded now.
void replay(const Layer& l, const Read& r, const float* logs, const Records& records, float* state, const float* v,
            float* out) {
    const int64_t K = padded(l.key_dim), held = records.held;
    std::vector<float> room((held + 3) * K + 2 * held, 0.0f);
    float *keys = room.data(), *since = keys + held * K, *xk = since + K, *xq = xk + K, *dk = xq + K, *dq = dk + held;
    decayed(l, records, keys, since);
    for (int64_t i = 0; i < K; i += 16) {
        store(xk + i, load(r.ka + i) * load(since + i));
        store(xq + i, load(r.qa + i) * load(since + i));
    }
    for (int64_t j = 0; j < held; j++) dk[j] = dot(keys + j * K, r.ka, K), dq[j] = dot(keys + j * K, r.qa, K);
    for (int64_t first = 0; first < l.value_dim; first += 16) {
        const int64_t n = l.value_dim - first < 16 ? l.value_dim - first : 16;
        float* s = state + first * l.key_dim;
        v16 parts[2][16] = {};
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < l.key_dim; k += 16) {
                const v16 row = load(s + i * l.key_dim + k, l.key_dim - k);
                parts[0][i] += row * load(xk + k);
                parts[1][i] += row * load(xq + k);
            }
        v16 seen = sums(parts[0]), answer = sums(parts[1]);
        for (int64_t j = 0; j < held; j++) {
            const v16 old = load(records.u + j * l.value_dim + first, n);
            seen += old * dk[j];
            answer += old * dq[j];
        }
        v16 u = r.beta * load(v + first, n);
        if (l.corrected) u -= r.beta * seen;
        store(out + first, answer + r.dots * u, n);
        if (!records.fold) {
            store(records.u + held * l.value_dim + first, u, n);
            continue;
        }
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < l.key_dim; k += 16) {
                float* at = s + i * l.key_dim + k;
                v16 x = load(at, l.key_dim - k) * load(since + k);
                for (int64_t j = 0; j < held; j++) x += records.u[j * l.value_dim + first + i] * load(keys + j * K + k);
                store(at, x * load(r.a + k) + u[i] * load(r.k + k), l.key_dim - k);
            }
    }
    if (!records.fold) keep(l, records, r, logs);
}

// What a row gives that has no state.
void advance_nothing(const Layer& l, const Read& r, const float* v, float* out) {
    for (int64_t i = 0; i < l.value_dim; i += 16) {
        const int64_t n = l.value_dim - i;
        store(out + i, r.dots * r.beta * load(v + i, n), n);
    }
}

template <class T>
inline v16 opened(const Layer& l, const T* gate, int64_t n) {
    const v16 x = load(gate, n);
    return l.sigmoid_gate ? sigmoid(x) : silu(x);
}

// y = rms_norm(o) weight * gate, or rms_norm(o * gate) weight, over `width` channels.
template <class T>
void finish(const Layer& l, float* o, const T* gate, const float* weight, int64_t width, T* y) {
    v16 squares{};
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t n = width - i;
        v16 x = load(o + i, n);
        if (l.gate_first) x *= opened(l, gate + i, n);
        squares += x * x;
        store(o + i, x, n);
    }
    const float r = 1.0f / std::sqrt(sum(squares) / (float)width + l.eps);
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t n = width - i;
        v16 x = load(o + i, n) * r * load(weight + i, n);
        if (!l.gate_first) x *= opened(l, gate + i, n);
        store(y + i, x, n);
    }
}

// One row's q/k head and the value heads that read it.
template <class T>
void run_head(const Layer& l, const Rows<T>& rows, int64_t b, int64_t slot, int64_t key_head, std::vector<float>& room) {
    const int64_t K = padded(l.key_dim), group = l.heads / l.key_heads, V = l.value_dim, first = key_head * group;
    room.assign(6 * K + 2 * padded(group * V), 0.0f);
    float *q = room.data(), *k = q + K, *a = k + K, *ka = a + K, *qa = ka + K, *logs = qa + K, *v = logs + K;
    float* o = v + padded(group * V);
    const T* x = rows.x + b * rows.x_stride;
    convolve(l, l.q, slot, key_head, x, q);
    convolve(l, l.k, slot, key_head, x, k);
    for (int64_t i = 0; i < group; i++) convolve(l, l.v, slot, first + i, x, v + i * V);
    if (l.normalised) {
        scale_by(q, 1.0f / std::sqrt(dot(q, q, K) + 1e-6f), K);
        scale_by(k, 1.0f / std::sqrt(dot(k, k, K) + 1e-6f), K);
    }
    scale_by(q, l.scale, K);
    const float dots = dot(q, k, K);
    for (int64_t i = 0; i < group; i++) {
        const int64_t head = first + i;
        const float step = decays(l, head, rows.raw + b * rows.raw_stride, a, logs);
        if (l.gate_dim == 1) std::fill(a + 1, a + l.key_dim, a[0]);
        for (int64_t j = 0; j < K; j += 16) {
            store(ka + j, load(k + j) * load(a + j));
            store(qa + j, load(q + j) * load(a + j));
        }
        const float beta = l.decay == kStep ? step : sigmoid(load(rows.beta + b * rows.beta_stride + head, 1))[0];
        const Read read{k, q, ka, qa, a, dots, beta};
        float* state = l.state + slot * l.slot_stride + head * l.head_stride;
        if (!slot) {
            advance_nothing(l, read, v + i * V, o + i * V);
        } else if (!rows.held || (!rows.held[b] && rows.fold[b])) {
            advance(l, read, state, state + l.head_stride, v + i * V, o + i * V);
        } else {
            const int64_t at = (slot * l.heads + head) * l.ring;
            const Records records{l.ring_k + at * l.key_dim, l.ring_u + at * V, l.ring_g + at * l.gate_dim,
                                  rows.held[b], rows.fold[b] != 0};
            replay(l, read, logs, records, state, v + i * V, o + i * V);
        }
        for (int64_t j = 0; j < V; j += 16) {
            v16 out = load(o + i * V + j, V - j);
            if (l.skip) out += load(v + i * V + j, V - j) * l.skip[head];
            store(o + i * V + j, as(x, out), V - j);
        }
    }
    const T* gate = rows.gate + b * rows.gate_stride + first * V;
    T* y = rows.y + b * rows.y_stride + first * V;
    if (l.gate_first) {
        finish(l, o, gate, l.norm + first * V, group * V, y);
        return;
    }
    for (int64_t i = 0; i < group; i++) finish(l, o + i * V, gate + i * V, l.norm, V, y + i * V);
}

template <class T>
void run(const Layer& l, const Rows<T>& rows, int64_t count, const int64_t* slots, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> room;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count * l.key_heads; i++) {
            const int64_t b = i / l.key_heads;
            run_head(l, rows, b, slots[b], i % l.key_heads, room);
        }
    }
}

}  // namespace

// Rows in float or bf16 (narrow), so many elements apart; slots [count]. y [count, heads * value_dim].
extern "C" void pdserve_recurrent(const Layer* layer, int64_t narrow, int64_t count, const int64_t* slots,
                                  const Rows<void>* rows, int64_t threads) {
    if (narrow)
        run(*layer, *(const Rows<bf16>*)rows, count, slots, threads);
    else
        run(*layer, *(const Rows<float>*)rows, count, slots, threads);
}
