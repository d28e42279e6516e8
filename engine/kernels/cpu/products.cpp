// Matrix products of few rows in fp32, over the weights as oneDNN packs them: [out / 64][in to a multiple of 16][64].
//
// Why it exists: with few rows a product is bound by reading the weights once from memory, and oneDNN's own kernel leaves
// half of what a core can read: it asks for nothing ahead. Every output is the sum over its inputs in their order, one
// fused multiply-add after the other, as there: the same bits, however many rows there are.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kWide = 64;   // outputs of a panel
constexpr int64_t kSlice = 64;  // inputs after which the next rows are taken, with the panel's slice in the first cache
constexpr int64_t kAhead = 128;  // inputs between what is fetched and what is used
constexpr int64_t kRows = 32;    // taken at once

struct Linear {
    const float* weight;
    const float* bias;  // or null
    int64_t out, in;

    int64_t padded() const { return (in + 15) / 16 * 16; }
    int64_t panels() const { return (out + kWide - 1) / kWide; }
    const float* panel(int64_t p) const { return weight + p * padded() * kWide; }
};

// sums[R][4] += x[R rows][inputs] times a slice of a panel, fetching N lines of 64 bytes from `ahead` at every input.
template <int R, int N>
inline void slice(const float* const* x, const float* w, int64_t inputs, const float* ahead, v16* sums) {
    v16 acc[R][4];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < 4; b++) acc[r][b] = sums[r * 4 + b];
    for (int64_t k = 0; k < inputs; k++) {
        v16 weights[4];
        for (int b = 0; b < 4; b++) weights[b] = load(w + k * kWide + b * 16);
        for (int n = 0; n < N; n++) __builtin_prefetch(ahead + (k * N + n) * 16);
        for (int r = 0; r < R; r++) {
            v16 input = splat(x[r][k]);
            for (int b = 0; b < 4; b++) acc[r][b] += input * weights[b];
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < 4; b++) sums[r * 4 + b] = acc[r][b];
}

template <int N>
inline void slices(int64_t rows, const float* const* x, const float* w, int64_t inputs, const float* ahead, v16* sums) {
    for (int64_t r = 0; r < rows; r += 4, ahead += inputs * N * 16) {
        switch (rows - r) {
            case 1: slice<1, N>(x + r, w, inputs, ahead, sums + r * 4); break;
            case 2: slice<2, N>(x + r, w, inputs, ahead, sums + r * 4); break;
            case 3: slice<3, N>(x + r, w, inputs, ahead, sums + r * 4); break;
            default: slice<4, N>(x + r, w, inputs, ahead, sums + r * 4);
        }
    }
}

// One panel of y = x Wt + b: rows up to kRows, given by their addresses. sums [rows][4].
void panel_of(const Linear& l, int64_t panel, int64_t rows, const float* const* x, v16* sums) {
    std::fill(sums, sums + rows * 4, v16{});
    const float* w = l.panel(panel);
    const float* at[kRows];
    for (int64_t k = 0; k < l.in; k += kSlice) {
        const int64_t inputs = std::min(kSlice, l.in - k);
        for (int64_t r = 0; r < rows; r++) at[r] = x[r] + k;
        const float *here = w + k * kWide, *ahead = here + kAhead * kWide;
        if (rows <= 4)
            slices<4>(rows, at, here, inputs, ahead, sums);
        else if (rows <= 8)
            slices<2>(rows, at, here, inputs, ahead, sums);
        else
            slices<1>(rows, at, here, inputs, ahead, sums);
    }
    if (!l.bias) return;
    for (int b = 0; b < 4; b++) {
        const int64_t left = l.out - panel * kWide - b * 16;
        if (left <= 0) continue;
        const v16 bias = load(l.bias + panel * kWide + b * 16, left);
        for (int64_t r = 0; r < rows; r++) sums[r * 4 + b] += bias;
    }
}

// Store a panel's sums, or add them to what is there.
void place(const Linear& l, int64_t panel, int64_t rows, const v16* sums, float* const* y, bool add) {
    for (int64_t r = 0; r < rows; r++)
        for (int b = 0; b < 4; b++) {
            const int64_t n = panel * kWide + b * 16, left = l.out - n;
            if (left <= 0) break;
            store(y[r] + n, add ? load(y[r] + n, left) + sums[r * 4 + b] : sums[r * 4 + b], left);
        }
}

enum Kind : int64_t { kSilu, kSitu, kRelu2 };

struct Activation {
    int64_t kind;
    float beta, linear_beta;  // of kSitu; linear_beta 0 = the second half as it is
};

inline v16 opened(const Activation& a, v16 gate, v16 up) {
    if (a.kind == kSilu) return silu(gate) * up;
    const v16 lifted = a.linear_beta != 0.0f ? a.linear_beta * hyperbolic(up / a.linear_beta) : up;
    return a.beta * hyperbolic(gate / a.beta) * sigmoid(gate) * lifted;
}

// In place: the first `inner` of a row become its activation.
void activate(const Activation& a, float* x, int64_t inner) {
    for (int64_t i = 0; i < inner; i += 16) {
        const int64_t left = inner - i;
        const v16 gate = load(x + i, left);
        if (a.kind == kRelu2) {
            const v16 above = gate > 0.0f ? gate : v16{};
            store(x + i, above * above, left);
        } else {
            store(x + i, opened(a, gate, load(x + inner + i, left)), left);
        }
    }
}

}  // namespace

// Feed-forward parts: `count` experts, of which each row takes some, and one more that all rows take (if it has any).
struct Experts {
    const Linear *up, *down;          // [count]
    const Linear *all_up, *all_down;  // or null
    int64_t count;
    Activation activation;
};

namespace {

// Rows that go through the same matrices: where each comes from, and its place among the results.
struct Group {
    const Linear *up, *down;
    std::vector<const float*> from;
    std::vector<float*> inside, to;
};

struct Tile {
    const Group* group;
    int64_t panel;
};

void run_tile(const Linear& l, int64_t panel, const std::vector<const float*>& from, float* const* to) {
    v16 sums[kRows * 4];
    for (size_t first = 0; first < from.size(); first += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, from.size() - first);
        panel_of(l, panel, rows, from.data() + first, sums);
        place(l, panel, rows, sums, to + first, false);
    }
}

}  // namespace


// y[r] = x[r] Wt + b (+ add[r]), rows of x, add and y so many floats apart; add may be y, or null.
extern "C" void pdserve_linear(const Linear* linear, const float* x, int64_t x_stride, int64_t rows, const float* add,
                               int64_t add_stride, float* y, int64_t y_stride, int64_t threads) {
    const Linear& l = *linear;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < l.panels(); panel++) {
        v16 sums[kRows * 4];
        const float* from[kRows];
        float* to[kRows];
        for (int64_t first = 0; first < rows; first += kRows) {
            const int64_t count = std::min(kRows, rows - first);
            for (int64_t r = 0; r < count; r++) {
                from[r] = x + (first + r) * x_stride;
                to[r] = y + (first + r) * y_stride;
                if (add && add != y) {
                    const int64_t n = panel * kWide, left = std::min(kWide, l.out - n);
                    memcpy(to[r] + n, add + (first + r) * add_stride + n, left * sizeof(float));
                }
            }
            panel_of(l, panel, count, from, sums);
            place(l, panel, count, sums, to, add != nullptr);
        }
    }
}

// y[r] = add[r] + sum_j weights[r][j] expert_j(x[r]) + all_weights[r] all(x[r]). chosen, weights [rows][k]; add and
// all_weights may be null (nothing; one each).
extern "C" void pdserve_experts(const Experts* experts, const float* x, int64_t x_stride, int64_t rows,
                                const int64_t* chosen, const float* weights, int64_t k, const float* all_weights,
                                const float* add, int64_t add_stride, float* y, int64_t threads) {
    const Experts& e = *experts;
    const Linear& any_up = e.count ? *e.up : *e.all_up;
    const int64_t out = e.count ? e.down->out : e.all_down->out;
    const int64_t routed = any_up.out, common = e.all_up ? e.all_up->out : 0;
    std::vector<float> inside(rows * (k * routed + common)), results(rows * (k + (common ? 1 : 0)) * out);
    std::vector<Group> groups(e.count + 1);
    for (int64_t cell = 0; cell < rows * k; cell++) {
        Group& group = groups[chosen[cell]];
        group.from.push_back(x + cell / k * x_stride);
        group.inside.push_back(&inside[cell * routed]);
        group.to.push_back(&results[cell * out]);
    }
    for (int64_t i = 0; i < e.count; i++) groups[i].up = e.up + i, groups[i].down = e.down + i;
    Group& all = groups[e.count];
    all.up = e.all_up, all.down = e.all_down;
    for (int64_t r = 0; r < rows && common; r++) {
        all.from.push_back(x + r * x_stride);
        all.inside.push_back(&inside[rows * k * routed + r * common]);
        all.to.push_back(&results[(rows * k + r) * out]);
    }
    std::vector<Tile> up, down;
    for (const Group& group : groups) {
        if (group.from.empty()) continue;
        for (int64_t p = 0; p < group.up->panels(); p++) up.push_back({&group, p});
        for (int64_t p = 0; p < group.down->panels(); p++) down.push_back({&group, p});
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (size_t i = 0; i < up.size(); i++) {
            const Group& g = *up[i].group;
            run_tile(*g.up, up[i].panel, g.from, g.inside.data());
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * (k + (common ? 1 : 0)); i++) {
            if (i < rows * k)
                activate(e.activation, &inside[i * routed], e.down->in);
            else
                activate(e.activation, &inside[rows * k * routed + (i - rows * k) * common], e.all_down->in);
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < down.size(); i++) {
            const Group& g = *down[i].group;
            const std::vector<const float*> from(g.inside.begin(), g.inside.end());
            run_tile(*g.down, down[i].panel, from, g.to.data());
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t n = 0; n < out; n += 16) {
                const int64_t left = out - n;
                v16 total{};
                for (int64_t j = 0; j < k; j++)
                    total += weights[r * k + j] * load(&results[(r * k + j) * out + n], left);
                if (add) total += load(add + r * add_stride + n, left);
                if (common) total += (all_weights ? all_weights[r] : 1.0f) * load(&results[(rows * k + r) * out + n], left);
                store(y + r * out + n, total, left);
            }
        }
    }
}
