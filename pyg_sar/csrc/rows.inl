// Types of numbers, operations on rows, and the walk over the rows of a CSR matrix by all threads.

template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct bf16 {
  uint16_t bits;
  bf16() = default;
  explicit bf16(float x) {
    const uint32_t b = std::bit_cast<uint32_t>(x);
    bits = uint16_t(x == x ? (b + 0x7fff + (b >> 16 & 1)) >> 16 : 0x7fc0);
  }
  operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

struct f16 {
  uint16_t bits;
  f16() = default;
  // Below the smallest normal number the processor rounds, as it adds 0.5, whose last place is worth as much.
  explicit f16(float x) {
    const uint32_t b = std::bit_cast<uint32_t>(x), magnitude = b & 0x7fffffff;
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    bits = uint16_t((b >> 16 & 0x8000) | (magnitude < 0x38800000 ? small : magnitude < 0x47800000 ? normal : large));
  }
  // Scaled by a power of two, which is exact for subnormal numbers, too; infinities and NaN keep their exponent.
  operator float() const {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13, sign = uint32_t(bits & 0x8000) << 16;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t finite = std::bit_cast<uint32_t>(scaled);
    const uint32_t special = magnitude | 0x7f800000;
    return std::bit_cast<float>(sign | (magnitude >= 0x0f800000 ? special : finite));
  }
};

template <class P>
auto typed(Rows<const void> r) {
  return Rows<const P>{static_cast<const P*>(r.data), r.stride};
}
template <class P>
auto typed(Rows<void> r) {
  return Rows<P>{static_cast<P*>(r.data), r.stride};
}

// exp to about one unit in the last place; below -87 it is 0. Cephes' polynomial, in a form that vectorises.
inline float exponential(float x) {
  const float magic = 0x1.8p23f;
  const float clamped = x > 88.3f ? 88.3f : (x < -87.0f ? -87.0f : x);
  const float shifted = clamped * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(magic) + 127u) << 23;
  return x < -87.0f ? 0.0f : p * std::bit_cast<float>(power);
}
inline double exponential(double x) { return std::exp(x); }

// Always inlined, as GCC leaves out calls of functions that do nothing but this.
template <class T>
[[gnu::always_inline]] inline void prefetch(const T* row, int64_t n) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t k = 0; k < n * int64_t(sizeof(T)); k += 64) __builtin_prefetch(p + k);
}

// Asks for some columns of the rows index[begin], ..., index[end - 1].
template <class T, class I>
[[gnu::always_inline]] inline void prefetch(Rows<const T> rows, const I* index, int64_t begin, int64_t end, int64_t from, int64_t width) {
  for (int64_t k = begin; k < end; ++k) prefetch(rows[index[k]] + from, width);
}

#include "simd.inl"

// f(0), ..., f(n - 1), one behind the other.
template <int n, class F>
inline void unrolled(F f) {
  [&]<int... k>(std::integer_sequence<int, k...>) { (f(k), ...); }(std::make_integer_sequence<int, n>());
}

// y += f(j), a vector at column j.
template <class A, class F>
inline void add(A* __restrict y, int64_t width, const Tail<A>& tail, F f) {
  int64_t j = 0;
  for (; j + lanes<A> <= width; j += lanes<A>) store<A>(y + j, load(y + j) + f(j));
  j = width - lanes<A>;
  if (tail) store<A>(y + j, load(y + j) + tail(f(j)));
}

// y += sum_k w[k] rows[k] over `n` rows.
template <class A, class T>
inline void add_rows(A* __restrict y, const T* const* rows, const A* w, int n, int64_t width) {
  const Tail<A> tail(width);
  int k = 0;
  for (; k + 4 <= n && width >= lanes<A>; k += 4) {
    const T *a = rows[k], *b = rows[k + 1], *c = rows[k + 2], *d = rows[k + 3];
    const A p = w[k], q = w[k + 1], r = w[k + 2], s = w[k + 3];
    const auto sum = [=](int64_t j) {
      return (p * load(a + j) + q * load(b + j)) + (r * load(c + j) + s * load(d + j));
    };
    add(y, width, tail, sum);
  }
  for (; k < n; ++k) {
    const T* a = rows[k];
    const A p = w[k];
    if (width >= lanes<A>) {
      add(y, width, tail, [=](int64_t j) { return p * load(a + j); });
    } else {
      for (int64_t j = 0; j < width; ++j) y[j] += p * A(a[j]);
    }
  }
}

// The sum of f(j) over all columns.
template <class A, class F>
inline A fold(int64_t width, const Tail<A>& tail, F f) {
  Vector<A> sum{};
  for (int64_t j = 0; j + lanes<A> <= width; j += lanes<A>) sum += f(j);
  if (tail) sum += tail(f(width - lanes<A>));
  return total(sum);
}

// Not inlined: whatever the compiler makes of the loop, equal rows have the same product everywhere, to the last digit.
template <class A, class S, class T>
[[gnu::noinline]] A narrow_dot(const S* x, const T* y, int64_t width) {
  A sum = 0;
  for (int64_t j = 0; j < width; ++j) sum += A(x[j]) * A(y[j]);
  return sum;
}

template <class A, class S, class T>
inline A dot(const S* x, const T* y, int64_t width) {
  if (width < lanes<A>) return narrow_dot<A>(x, y, width);
  return fold<A>(width, Tail<A>(width), [=](int64_t j) { return load(x + j) * load(y + j); });
}

// out[k] = <x, rows[k]> for `n` rows, four at a time so that x is read once for all of them.
template <class A, class T>
inline void dot_rows(A* out, const T* x, const T* const* rows, int n, int64_t width) {
  const Tail<A> tail(width);
  int k = 0;
  for (; k + 4 <= n && width >= lanes<A>; k += 4) {
    const T *a = rows[k], *b = rows[k + 1], *c = rows[k + 2], *d = rows[k + 3];
    Vector<A> s{}, t{}, u{}, v{};
    for (int64_t j = 0; j + lanes<A> <= width; j += lanes<A>) {
      const Vector<A> z = load(x + j);
      s += z * load(a + j), t += z * load(b + j), u += z * load(c + j), v += z * load(d + j);
    }
    if (tail) {
      const int64_t j = width - lanes<A>;
      const Vector<A> z = load(x + j);
      s += tail(z * load(a + j)), t += tail(z * load(b + j)), u += tail(z * load(c + j)), v += tail(z * load(d + j));
    }
    out[k] = total(s), out[k + 1] = total(t), out[k + 2] = total(u), out[k + 3] = total(v);
  }
  for (; k < n; ++k) out[k] = dot<A>(x, rows[k], width);
}

// The walk. Edges are dealt out in units of equal size, cut where a row begins; a row longer than a unit (a hub) is cut
// into pieces, each summed into a state of its own, and the pieces are merged in their order. The units depend on the
// matrix alone, so that results do not depend on the number of threads.
//
// A body has `State home(row)`, `run(row, begin, end, State, unit)` and `int64_t size()`, of the state of a piece. Where that
// is not a row of sums, `A*`, it has `State part(A*)`, `clear(State)` and `merge(row, State into, State from)`, too. A body
// that has `emit(row, State)` instead of `home` is given the sum over every row, also if that is empty.
template <class I, class A, class Body>
class Walk {
  using State = typename Body::State;

 public:
  Walk(const Csr& csr, Body& body) : csr_(csr), ptr_(static_cast<const I*>(csr.ptr)), body_(body) {
    unit_ = std::max<int64_t>(csr.edges / 512, 1024);
    for (int64_t begin = 0, first = 0; first < csr.rows; begin += unit_) {
      const int64_t last = begin + unit_ >= csr.edges ? csr.rows : row_from(begin + unit_);
      if (last > first) units_.push_back({first, last, 0, 0, -1});
      first = std::max(first, last);
    }
    for (int64_t edge = 0, seen = -1; edge < csr.edges; edge += unit_) {
      const int64_t row = row_of(edge);
      if (row != seen && hub(row)) cut(row);
      seen = row;
    }
    parts_.resize(pieces_ * body.size());
  }

  int64_t units() const { return int64_t(units_.size()); }

  void run(Parallel parallel) {
    parallel(units(), [](int64_t u, void* self) { static_cast<Walk*>(self)->work(u); }, this);
    for (size_t u = 0; u < units_.size(); ++u) {
      const Unit& unit = units_[u];
      if (unit.piece < 0) continue;
      if constexpr (EMITS) {
        for (; u + 1 < units_.size() && units_[u + 1].first == unit.first; ++u)
          merge(at(unit.first), part(unit), part(units_[u + 1]));
        body_.emit(at(unit.first), part(unit));
        fence();
      } else {
        merge(at(unit.first), body_.home(at(unit.first)), part(unit));
      }
    }
  }

 private:
  struct Unit {
    int64_t first, last;  // rows
    int64_t begin, end;   // edges of a piece
    int64_t piece;        // or -1
  };

  bool hub(int64_t row) const { return int64_t(ptr_[row + 1]) - int64_t(ptr_[row]) > unit_; }
  // The first row that begins at `edge` or later, and the row that `edge` belongs to.
  int64_t row_from(int64_t edge) const { return std::lower_bound(ptr_, ptr_ + csr_.rows, I(edge)) - ptr_; }
  int64_t row_of(int64_t edge) const { return std::upper_bound(ptr_, ptr_ + csr_.rows + 1, I(edge)) - ptr_ - 1; }

  int64_t at(int64_t row) const { return csr_.at<I>(row); }

  void cut(int64_t row) {
    for (int64_t begin = ptr_[row]; begin < int64_t(ptr_[row + 1]); begin += unit_)
      units_.push_back({row, row + 1, begin, std::min(begin + unit_, int64_t(ptr_[row + 1])), pieces_++});
  }

  State part(const Unit& unit) { return part(parts_.data() + unit.piece * body_.size()); }
  State part(A* p) {
    if constexpr (SUMS) return p;
    else return body_.part(p);
  }
  void clear(State s) {
    if constexpr (SUMS) std::fill_n(s, body_.size(), A(0));
    else body_.clear(s);
  }
  void merge(int64_t row, State into, State from) {
    if constexpr (SUMS) {
      for (int64_t k = 0; into != nullptr && k < body_.size(); ++k) into[k] += from[k];
    } else {
      body_.merge(row, into, from);
    }
  }

  void work(int64_t u) {
    const Unit& unit = units_[u];
    if (unit.piece >= 0) {
      const State state = part(unit);
      clear(state);
      body_.run(at(unit.first), unit.begin, unit.end, state, u);
      return;
    }
    if constexpr (EMITS) {
      std::vector<A> sum(body_.size());
      const State state = part(sum.data());
      for (int64_t row = unit.first; row < unit.last; ++row) {
        if (hub(row)) continue;
        clear(state);
        body_.run(at(row), ptr_[row], ptr_[row + 1], state, u);
        body_.emit(at(row), state);
      }
      fence();
    } else {
      for (int64_t row = unit.first; row < unit.last; ++row)
        if (ptr_[row] < ptr_[row + 1] && !hub(row)) body_.run(at(row), ptr_[row], ptr_[row + 1], body_.home(at(row)), u);
    }
  }

  static constexpr bool SUMS = std::is_same_v<State, A*>;
  static constexpr bool EMITS = requires(Body& body, int64_t row, State state) { body.emit(row, state); };

  const Csr& csr_;
  const I* ptr_;
  Body& body_;
  int64_t unit_, pieces_ = 0;
  std::vector<Unit> units_;
  std::vector<A> parts_;
};

// Calls f(unit, begin, end) for all units of `size` rows.
template <class F>
void for_row_units(int64_t rows, int64_t size, Parallel parallel, F f) {
  struct Job {
    F& f;
    int64_t rows, size;
  } job{f, rows, size};
  parallel((rows + job.size - 1) / job.size, [](int64_t u, void* context) {
    const Job& job = *static_cast<Job*>(context);
    job.f(u, u * job.size, std::min(job.rows, (u + 1) * job.size));
  }, &job);
}

// Calls f(row) for all rows.
template <class F>
void for_rows(int64_t rows, Parallel parallel, F f) {
  for_row_units(rows, 1024, parallel, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Wide rows are walked in tiles of some lines of memory, whose columns are copied side by side first: the copies of all
// rows fit a cache, or at least far fewer pages, than the rows themselves. Worth it where a row is read some times.
inline int64_t tile_columns(const Csr& csr, int64_t num_cols, int64_t width, int64_t bytes) {
  constexpr int64_t tile = 512, cache = 1 << 20, reads = 8;
  if (width * bytes <= tile || num_cols * width * bytes <= cache || csr.edges < reads * num_cols) return width;
  const int64_t tiles = (width * bytes + tile - 1) / tile;
  return (width + tiles - 1) / tiles;
}

template <class T>
class Tile {
 public:
  // Rows of which the columns [from, to) may be read, where they stand in `x`.
  Rows<const T> copy(Rows<const T> x, int64_t rows, int64_t from, int64_t to, Parallel parallel) {
    return copy(x, rows, rows, std::identity(), from, to, parallel);
  }
  // The same of some rows: at(0), ..., at(count - 1).
  template <class At>
  Rows<const T> copy(Rows<const T> x, int64_t rows, int64_t count, At at, int64_t from, int64_t to, Parallel parallel) {
    const int64_t width = to - from;
    if (!memory_ || size_ < rows * width) memory_.reset(new T[size_ = rows * width]);
    for_rows(count, parallel, [&, out = memory_.get()](int64_t k) { std::copy_n(x[at(k)] + from, width, out + at(k) * width); });
    return {memory_.get() - from, width};
  }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t size_ = 0;
};
