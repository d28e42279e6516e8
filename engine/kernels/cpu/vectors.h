// Sixteen floats at a time, and the functions of them that decode steps need. Plain C++, no torch headers.
//
// A type T of tensors is float or bf16; arithmetic is fp32, rounded where a tensor would be stored.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t u16x __attribute__((vector_size(64)));
typedef int32_t i16x __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

static inline v16 splat(float x) { return x - v16{}; }

static inline v16 load(const float* p) {
    v16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline v16 load(const bf16* p) {
    h16 raw;
    memcpy(&raw, p, sizeof raw);
    return (v16)(__builtin_convertvector(raw, u16x) << 16);
}

static inline void store(float* p, v16 x) { memcpy(p, &x, sizeof x); }

static inline h16 rounded(v16 x) {
    u16x bits = (u16x)x;
    u16x up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    i16x number = x == x;  // a NaN would round to something that is not one
    return __builtin_convertvector((up & (u16x)number) | (0x7fc0 & ~(u16x)number), h16);
}

static inline void store(bf16* p, v16 x) {
    h16 out = rounded(x);
    memcpy(p, &out, sizeof out);
}

// The first n of sixteen: zeros are read past them and nothing is written there.
template <class T>
static inline v16 load(const T* p, int64_t n) {
    if (n >= 16) return load(p);
    T part[16] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}

template <class T>
static inline void store(T* p, v16 x, int64_t n) {
    if (n >= 16) return store(p, x);
    T part[16];
    store(part, x);
    memcpy(p, part, n * sizeof(T));
}

// What is left of x when it is stored as a T.
static inline v16 as(const float*, v16 x) { return x; }
static inline v16 as(const bf16*, v16 x) { return (v16)(__builtin_convertvector(rounded(x), u16x) << 16); }

static inline float sum(v16 x) {
    for (int step = 8; step; step /= 2) x += __builtin_shuffle(x, i16x{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} ^ step);
    return x[0];
}

// e^x, relative error below 2e-7 (Cephes' expf); 0 below -87, and clamped above 88.
static inline v16 exponential(v16 x) {
    i16x tiny = x < -87.0f;
    v16 y = x < -87.0f ? splat(-87.0f) : x;
    y = y > 88.0f ? splat(88.0f) : y;
    v16 scaled = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
    v16 n = scaled - 12582912.0f;
    v16 r = y - n * 0.693359375f + n * 2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16x power = (__builtin_convertvector(n, i16x) + 127) << 23;
    v16 found = p * (v16)power;
    return tiny ? v16{} : (x == x ? found : x);
}

// ln x of a normal x > 0, relative error below 2e-7 (Cephes' logf).
static inline v16 logarithm(v16 x) {
    i16x bits = (i16x)x;
    i16x exponent = (bits >> 23) - 126;
    v16 m = (v16)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
    i16x small = m < 0.707106781f;
    v16 e = __builtin_convertvector(exponent + small, v16);  // a true comparison is -1
    v16 r = (small ? m + m : m) - 1.0f;
    v16 z = r * r;
    v16 p = splat(7.0376836292e-2f);
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    v16 y = r * z * p + e * -2.12194440e-4f - 0.5f * z;
    return r + y + e * 0.693359375f;
}

static inline v16 sigmoid(v16 x) {
    v16 e = exponential(x < 0.0f ? x : -x);  // e^-|x|
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

static inline v16 silu(v16 x) { return x * sigmoid(x); }

// ln(1 + e^x); as torch has it, x itself past 20.
static inline v16 softplus(v16 x) {
    v16 e = exponential(x);
    v16 one = 1.0f + e;
    v16 lost = one - 1.0f;  // what of e is left in the sum: the quotient makes up for the rest
    v16 y = lost == 0.0f ? e : logarithm(one) * (e / (lost == 0.0f ? splat(1.0f) : lost));
    return x > 20.0f ? x : (x == x ? y : x);
}

// tanh x = 1 - 2 / (1 + e^2x), from the odd series where that would cancel.
static inline v16 hyperbolic(v16 x) {
    v16 size = x < 0.0f ? -x : x;
    v16 e = exponential(-2.0f * size);
    v16 big = (1.0f - e) / (1.0f + e);
    v16 z = x * x;
    v16 p = splat(-5.70498872745e-3f);  // Cephes' tanhf below 0.625
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    v16 near = size + size * z * p;
    v16 y = size < 0.625f ? near : big;
    return x < 0.0f ? -y : y;
}

// The sums of sixteen vectors, in their order.
static inline v16 sums(const v16* rows) {
    constexpr i16x first[4] = {{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
                               {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
                               {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
                               {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}};
    constexpr int32_t half[4] = {8, 4, 2, 1};
    v16 part[16];
    memcpy(part, rows, sizeof part);
    for (int stage = 0, n = 16; stage < 4; stage++, n /= 2)
        for (int i = 0; i < n / 2; i++) {
            v16 a = part[2 * i], b = part[2 * i + 1];
            part[i] = __builtin_shuffle(a, b, first[stage]) + __builtin_shuffle(a, b, first[stage] + half[stage]);
        }
    return part[0];
}
