// Reads rows in the order of the edges, and does no more with them than keeps the compiler from leaving it out: the
// least that an aggregation over these edges can take on a machine. Threads share the edges evenly, and each asks for
// rows some edges ahead.

#include <cstddef>
#include <cstdint>
#include <cstring>

typedef uint64_t Line __attribute__((vector_size(64), aligned(1), may_alias));

static inline void prefetch(const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

extern "C" uint64_t gather(
    const int32_t* index, int64_t edges, const char* rows, int64_t bytes, int64_t ahead, int threads) {
  uint64_t sink = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(^ : sink)
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = edges * t / threads, end = edges * (t + 1) / threads;
    Line even = {}, odd = {};
    uint64_t rest = 0;
    for (int64_t e = begin; e < end; ++e) {
      if (e + ahead < end) prefetch(rows + index[e + ahead] * bytes, bytes);
      const char* row = rows + index[e] * bytes;
      int64_t b = 0;
      for (; b + 128 <= bytes; b += 128) {
        even ^= *(const Line*)(row + b);
        odd ^= *(const Line*)(row + b + 64);
      }
      for (; b + 64 <= bytes; b += 64) even ^= *(const Line*)(row + b);
      for (; b < bytes; b += 8) {
        uint64_t word = 0;
        memcpy(&word, row + b, bytes - b < 8 ? bytes - b : 8);
        rest ^= word;
      }
    }
    even ^= odd;
    for (int k = 0; k < 8; ++k) rest ^= even[k];
    sink ^= rest;
  }
  return sink;
}
