// Vectors of VECTOR_BYTES bytes: what the compilers' own vectorisers do not do well enough, in GCC's vector extensions.

template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class A>
using Vector = typename VectorOf<A>::type;
using Words = Vector<uint32_t>;

template <class A>
constexpr int64_t lanes = VECTOR_BYTES / int64_t(sizeof(A));

inline Vector<float> load(const float* p) {
  Vector<float> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Vector<double> load(const double* p) {
  Vector<double> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline Words widen(const void* p) {
#if VECTOR_BYTES == 64  // GCC 12 would do it by halves, and warns of what the form without a mask leaves undefined
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif VECTOR_BYTES == 32
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  typedef uint16_t Half __attribute__((vector_size(VECTOR_BYTES / 2)));
  Half h;
  std::memcpy(&h, p, sizeof(h));
  return __builtin_convertvector(h, Words);
#endif
}

inline Vector<float> load(const bf16* p) { return (Vector<float>)(widen(p) << 16); }

// As f16's own conversion.
inline Vector<float> load(const f16* p) {
  const Words bits = widen(p), magnitude = (bits & 0x7fff) << 13;
  const Words finite = (Words)((Vector<float>)magnitude * 0x1p112f), special = magnitude | 0x7f800000;
  const Words large = (Words)(magnitude >= 0x0f800000);
  return (Vector<float>)((bits & 0x8000) << 16 | (special & large) | (finite & ~large));
}

template <class A>
inline void store(A* p, Vector<A> v) {
  std::memcpy(p, &v, sizeof(v));
}

// Rounds n numbers to `y`, which is aligned to 16 bytes, past the caches: they keep what is read again. `fence` makes such
// stores visible to other threads.
template <class T, class A>
inline void stream(T* y, const A* x, int64_t n) {
  constexpr int64_t size = 256 / int64_t(sizeof(T));
  alignas(16) T rounded[size];
  for (int64_t j = 0; j < n; j += size) {
    const int64_t m = std::min(size, n - j);
#pragma omp simd
    for (int64_t k = 0; k < m; ++k) rounded[k] = T(x[j + k]);
    int64_t k = 0;
#if defined(__x86_64__)
    for (constexpr int64_t line = 16 / int64_t(sizeof(T)); k + line <= m; k += line)
      _mm_stream_si128(reinterpret_cast<__m128i*>(y + j + k), _mm_load_si128(reinterpret_cast<__m128i*>(rounded + k)));
#endif
    for (; k < m; ++k) y[j + k] = rounded[k];
  }
}
inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The sum of all lanes, by halves.
template <class V>
inline auto total(V v) {
  constexpr int n = sizeof(v) / sizeof(v[0]);
  if constexpr (n == 2) {
    return v[0] + v[1];
  } else {
#if __has_builtin(__builtin_shufflevector)
    if constexpr (n == 16) {
      return total(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
    } else if constexpr (n == 8) {
      return total(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
    } else {
      return total(__builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3));
    }
#else  // GCC before 12, which then keeps v in memory
    typedef std::remove_reference_t<decltype(v[0])> Half __attribute__((vector_size(sizeof(V) / 2)));
    Half low, high;
    std::memcpy(&low, &v, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    return total(Half(low + high));
#endif
  }
}

// The last vector of a row that does not fill it starts early; `Tail` keeps of it what was not counted before.
template <class A>
class Tail {
  using Bits = Vector<std::conditional_t<sizeof(A) == 8, int64_t, int32_t>>;

 public:
  explicit Tail(int64_t width) : left_(width % lanes<A>) {
    for (int64_t l = 0; l < lanes<A>; ++l) mask_[l] = l >= lanes<A> - left_ ? -1 : 0;
  }
  explicit operator bool() const { return left_ > 0; }
  Vector<A> operator()(Vector<A> v) const { return (Vector<A>)((Bits)v & mask_); }

 private:
  int64_t left_;
  Bits mask_{};
};
