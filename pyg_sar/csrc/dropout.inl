// Dropout whose mask is a function of a seed, an id and a column (or head), as in pyg_sar/ops/dropout.py; and dropout of
// rows.

inline uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}

// Of `count` columns from the number `first` on. Without ids, nothing is dropped.
template <class A>
class Dropout {
 public:
  Dropout(const int64_t* id, int64_t seed, double p, int64_t first, int64_t count) : id_(id) {
    if (id_ == nullptr) return;
    const auto key = [&](int64_t k) { return mix(mix(mix(uint32_t(k)) ^ uint32_t(seed)) ^ uint32_t(uint64_t(seed) >> 32)); };
    of_ids_ = key(1);
    for (int64_t c = first; c < first + count; ++c) of_columns_.push_back(key(c + 2));
    const uint64_t bound = uint64_t(std::nearbyint(p * 0x1p32));
    threshold_ = uint32_t(std::min<uint64_t>(bound, UINT32_MAX));
    scale_ = bound <= UINT32_MAX ? A(1) / A(1 - p) : A(0);
  }
  explicit operator bool() const { return id_ != nullptr; }
  A scale() const { return scale_; }
  // What all columns of an id share.
  uint32_t word(int64_t position) const {
    const uint64_t id = uint64_t(id_[position]);
    return mix(mix(uint32_t(id) ^ of_ids_) ^ uint32_t(id >> 32) ^ of_ids_);
  }
  const uint32_t* of_columns() const { return of_columns_.data(); }
  uint32_t threshold() const { return threshold_; }
  A operator()(int64_t position, int64_t column) const {
    return mix(word(position) ^ of_columns_[column]) >= threshold_ ? scale_ : A(0);
  }

 private:
  const int64_t* id_;
  std::vector<uint32_t> of_columns_;
  uint32_t of_ids_ = 0, threshold_ = 0;
  A scale_ = 1;
};

template <class T>
void dropout_rows(const DropoutRows& op, Parallel parallel) {
  using A = Acc<T>;
  const Rows<const T> x = typed<T>(op.x);
  const Rows<T> out = typed<T>(op.out);
  const Dropout<A> dropout(op.id, op.seed, op.p, 0, op.width);
  const int64_t size = std::max<int64_t>(1, (1 << 16) / (op.width + 1));
  for_row_units(op.rows, size, parallel, [&](int64_t, int64_t begin, int64_t end) {
    // All of it local, or the innermost loop is not vectorised.
    const A scale = A(T(dropout.scale()));  // rounded like the factors of torch's dropout
    const int64_t width = op.width;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t word = dropout.word(i), threshold = dropout.threshold();
      const uint32_t* __restrict key = dropout.of_columns();
      const T* __restrict row = x[i];
      T* __restrict into = out[i];
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) into[c] = T(A(row[c]) * (mix(word ^ key[c]) >= threshold ? scale : A(0)));
    }
  });
}
