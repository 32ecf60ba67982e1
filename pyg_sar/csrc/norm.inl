// Normalisation by column: moments of columns, sums of products with a gradient, and rows scaled and shifted.
//
// Rows are dealt out in units of a size that depends on the matrix alone, so that results do not depend on the number of
// threads. A unit is walked in blocks that stay in a cache: sums over a block are in the type A, those over blocks double.

constexpr int64_t BLOCK = 32;  // rows

inline int64_t unit_of_rows(int64_t rows) { return std::max<int64_t>(1024, (rows + 255) / 256); }

// Merge the moments of n more rows into those of `count` rows (Chan, Golub & LeVeque 1979), column by column.
inline void merge_moments(double* __restrict mean, double* __restrict m2, double count, const double* __restrict more_mean,
                          const double* __restrict more_m2, double n, int64_t width) {
  const double share = n / (count + n), both = count * share;
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const double delta = more_mean[c] - mean[c];
    mean[c] += delta * share, m2[c] += more_m2[c] + delta * delta * both;
  }
}

template <class T>
void moments(const Moments& op, Parallel parallel) {
  using A = Acc<T>;
  const Rows<const T> x = typed<T>(op.x);
  const int64_t width = op.width, size = unit_of_rows(op.rows);
  // Means are counted from the first row, so that a large one costs no digits.
  std::vector<double> parts((op.rows + size - 1) / size * 2 * width);
  for_row_units(op.rows, size, parallel, [&](int64_t u, int64_t begin, int64_t end) {
    std::vector<A> sums(3 * width);
    std::vector<double> block(2 * width);
    for (int64_t i = begin; i < end; i += BLOCK) {
      const int64_t n = std::min(BLOCK, end - i);
      A *__restrict guess = sums.data(), *__restrict sum = guess + width, *__restrict squares = sum + width;
      std::fill(sums.begin(), sums.end(), A(0));
      for (int64_t k = i; k < i + n; ++k) {
        const T* __restrict row = x[k];
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) guess[c] += A(row[c]);
      }
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) guess[c] /= A(n);
      for (int64_t k = i; k < i + n; ++k) {  // the rows are in the cache by now
        const T* __restrict row = x[k];
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) {
          const A deviation = A(row[c]) - guess[c];
          sum[c] += deviation, squares[c] += deviation * deviation;
        }
      }
      double *__restrict mean = block.data(), *__restrict m2 = mean + width;
      const T* __restrict first = x[0];
      const double share = 1 / double(n);
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        const double shift = double(sum[c]) * share;  // what the guess lacks
        mean[c] = double(guess[c]) - double(A(first[c])) + shift, m2[c] = double(squares[c]) - shift * double(sum[c]);
      }
      double* part = parts.data() + u * 2 * width;
      merge_moments(part, part + width, double(i - begin), mean, m2, double(n), width);
    }
  });
  for (int64_t u = 0; u * size < op.rows; ++u) {
    const double *part = parts.data() + u * 2 * width, n = double(std::min(size, op.rows - u * size));
    merge_moments(op.mean, op.m2, double(u * size), part, part + width, n, width);
  }
  for (int64_t c = 0; c < width && op.rows > 0; ++c) op.mean[c] += double(A(x[0][c]));
}

template <class T>
void column_products(const ColumnProducts& op, Parallel parallel) {
  using A = Acc<T>;
  const Rows<const T> x = typed<T>(op.x), grad = typed<T>(op.grad);
  const A* __restrict center = static_cast<const A*>(op.center);
  const int64_t width = op.width, size = unit_of_rows(op.rows);
  std::vector<double> parts((op.rows + size - 1) / size * 2 * width);
  for_row_units(op.rows, size, parallel, [&](int64_t u, int64_t begin, int64_t end) {
    std::vector<A> here(2 * width);
    double* __restrict part = parts.data() + u * 2 * width;
    for (int64_t i = begin; i < end; i += BLOCK) {
      A *__restrict sum = here.data(), *__restrict product = sum + width;
      std::fill(here.begin(), here.end(), A(0));
      for (int64_t k = i; k < std::min(i + BLOCK, end); ++k) {
        const T *__restrict row = x[k], *__restrict g = grad[k];
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) {
          const A value = A(g[c]);
          sum[c] += value, product[c] += value * (A(row[c]) - center[c]);
        }
      }
#pragma omp simd
      for (int64_t c = 0; c < 2 * width; ++c) part[c] += double(sum[c]);
    }
  });
  for (int64_t u = 0; u * size < op.rows; ++u) {
    const double *sums = parts.data() + u * 2 * width, *products = sums + width;
    for (int64_t c = 0; c < width; ++c) op.sums[c] += sums[c], op.products[c] += products[c];
  }
}

template <class T>
void column_affine(const ColumnAffine& op, Parallel parallel) {
  using A = Acc<T>;
  const Rows<const T> x = typed<T>(op.x), grad = typed<T>(op.grad);
  const Rows<T> out = typed<T>(op.out);
  const A *center = static_cast<const A*>(op.center), *scale = static_cast<const A*>(op.scale);
  const A *shift = static_cast<const A*>(op.shift), *factor = static_cast<const A*>(op.factor);
  // Large results go past the caches, where they would take the place of what is read.
  const bool past = op.rows * op.width * int64_t(sizeof(T)) >= 8 << 20 && out.stride * sizeof(T) % 16 == 0 &&
                    uintptr_t(out.data) % 16 == 0;
  // Threads that write the same huge page for the first time wait for each other.
  const int64_t size = std::max<int64_t>(64, std::min((op.rows + 15) / 16, (4 << 20) / (int64_t(sizeof(T)) * op.width + 1)));
  for_row_units(op.rows, size, parallel, [&](int64_t, int64_t begin, int64_t end) {
    std::vector<A> sum(op.width);
    for (int64_t i = begin; i < end; ++i) {
      const T* __restrict row = x[i];
      A* __restrict s = sum.data();
      if (grad) {
        const T* __restrict g = grad[i];
#pragma omp simd
        for (int64_t c = 0; c < op.width; ++c) s[c] = (A(row[c]) - center[c]) * scale[c] + shift[c] + A(g[c]) * factor[c];
      } else {
#pragma omp simd
        for (int64_t c = 0; c < op.width; ++c) s[c] = (A(row[c]) - center[c]) * scale[c] + shift[c];
      }
      if (past) {
        stream(out[i], s, op.width);
      } else {
        for (int64_t c = 0; c < op.width; ++c) out[i][c] = T(s[c]);
      }
    }
    fence();
  });
}
