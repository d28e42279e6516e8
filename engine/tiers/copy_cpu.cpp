// Copies between two pools in host memory, with the checksum (kvtransfer/checksum.py, wsum64-v1) taken on the way.
//
// The bytes pass the processor once: a block is summed while it comes into the first cache and leaves from there past
// the caches, so that neither the caches of whoever computes beside this nor memory's bandwidth carry more than they
// must. Called through ctypes, so without the interpreter's lock.

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 8192;

uint64_t summed(const uint64_t* __restrict__ words, const uint64_t* __restrict__ weights, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += words[i] * weights[i];
  return sum;
}

void past_caches(char* target, const char* source, int64_t bytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0 && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      const __m128i* from = reinterpret_cast<const __m128i*>(source + i);
      __m128i* to = reinterpret_cast<__m128i*>(target + i);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    return;
  }
#endif
  std::memcpy(target, source, bytes);
}

}  // namespace

// Spans of `units` units of `unit_bytes` each (a multiple of 8, as the addresses are). sums: [spans][units].
extern "C" void pdserve_move(const int64_t* targets, const int64_t* sources, int64_t spans, int64_t units,
                             int64_t unit_bytes, const uint64_t* weights, uint64_t* sums) {
  for (int64_t span = 0; span < spans; ++span) {
    char* target = reinterpret_cast<char*>(targets[span]);
    const char* source = reinterpret_cast<const char*>(sources[span]);
    for (int64_t unit = 0; unit < units; ++unit, target += unit_bytes, source += unit_bytes) {
      uint64_t sum = 0;
      for (int64_t at = 0; at < unit_bytes; at += kBlock) {
        const int64_t bytes = unit_bytes - at < kBlock ? unit_bytes - at : kBlock;
        sum += summed(reinterpret_cast<const uint64_t*>(source + at), weights + at / 8, bytes / 8);
        past_caches(target + at, source + at, bytes);
      }
      sums[span * units + unit] = sum;
    }
  }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
