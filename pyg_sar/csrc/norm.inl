// Normalisation by column: moments of columns, sums of products with a gradient, and rows scaled and shifted.
//
// Rows are dealt out in units of a size that depends on their number alone, so that results do not depend on the number of
// threads. A unit is walked in blocks that stay in a cache: sums over a block are in the type A, those over blocks double.

constexpr int64_t BLOCK_ROWS = 32, BLOCK_COLUMNS = 256;

inline int64_t unit_of_rows(int64_t rows) { return std::max<int64_t>(1024, (rows + 255) / 256); }

// Calls f(unit, begin, end) for all units of rows.
template <class F>
void for_row_units(int64_t rows, Parallel parallel, F f) {
  struct Job {
    F& f;
    int64_t rows, size;
  } job{f, rows, unit_of_rows(rows)};
  parallel((rows + job.size - 1) / job.size, [](int64_t u, void* context) {
    const Job& job = *static_cast<Job*>(context);
    job.f(u, u * job.size, std::min(job.rows, (u + 1) * job.size));
  }, &job);
}

// Calls f(first row, rows, first column, columns) for all blocks of the rows [begin, end).
template <class F>
void for_blocks(int64_t begin, int64_t end, int64_t width, F f) {
  for (int64_t i = begin; i < end; i += BLOCK_ROWS)
    for (int64_t j = 0; j < width; j += BLOCK_COLUMNS)
      f(i, std::min(BLOCK_ROWS, end - i), j, std::min(BLOCK_COLUMNS, width - j));
}

// Merge the moments of n more rows into those of `count` rows (Chan, Golub & LeVeque 1979).
inline void merge_moments(double& mean, double& m2, double count, double more_mean, double more_m2, double n) {
  const double delta = more_mean - mean, all = count + n;
  mean += delta * (n / all);
  m2 += more_m2 + delta * delta * (count * n / all);
}

template <class T>
void moments(const Moments& op, Parallel parallel) {
  using A = Acc<T>;
  const Rows<const T> x = typed<T>(op.x);
  const int64_t width = op.width, size = unit_of_rows(op.rows);
  // Means are counted from the first row, so that a large one costs no digits.
  std::vector<double> parts((op.rows + size - 1) / size * 2 * width);
  for_row_units(op.rows, parallel, [&](int64_t u, int64_t begin, int64_t end) {
    double *mean = parts.data() + u * 2 * width, *m2 = mean + width;
    for_blocks(begin, end, width, [&](int64_t i, int64_t n, int64_t j, int64_t columns) {
      A guess[BLOCK_COLUMNS]{}, sum[BLOCK_COLUMNS]{}, squares[BLOCK_COLUMNS]{};
      for (int64_t k = 0; k < n; ++k) {
        const T* __restrict row = x[i + k] + j;
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c) guess[c] += A(row[c]);
      }
      for (int64_t c = 0; c < columns; ++c) guess[c] /= A(n);
      for (int64_t k = 0; k < n; ++k) {  // the rows are in the cache by now
        const T* __restrict row = x[i + k] + j;
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c) {
          const A deviation = A(row[c]) - guess[c];
          sum[c] += deviation, squares[c] += deviation * deviation;
        }
      }
      for (int64_t c = 0; c < columns; ++c) {
        const double shift = double(sum[c]) / double(n);  // what the guess lacks
        const double here = double(guess[c]) - double(A(x[0][j + c])) + shift;
        merge_moments(mean[j + c], m2[j + c], double(i - begin), here, squares[c] - shift * sum[c], double(n));
      }
    });
  });
  for (int64_t u = 0; u * size < op.rows; ++u) {
    const double *mean = parts.data() + u * 2 * width, *m2 = mean + width;
    const double n = double(std::min(size, op.rows - u * size));
    for (int64_t c = 0; c < width; ++c) merge_moments(op.mean[c], op.m2[c], double(u * size), mean[c], m2[c], n);
  }
  for (int64_t c = 0; c < width && op.rows > 0; ++c) op.mean[c] += double(A(x[0][c]));
}

template <class T>
void column_products(const ColumnProducts& op, Parallel parallel) {
  using A = Acc<T>;
  const Rows<const T> x = typed<T>(op.x), grad = typed<T>(op.grad);
  const A* center = static_cast<const A*>(op.center);
  const int64_t width = op.width, size = unit_of_rows(op.rows);
  std::vector<double> parts((op.rows + size - 1) / size * 2 * width);
  for_row_units(op.rows, parallel, [&](int64_t u, int64_t begin, int64_t end) {
    double *sums = parts.data() + u * 2 * width, *products = sums + width;
    for_blocks(begin, end, width, [&](int64_t i, int64_t n, int64_t j, int64_t columns) {
      A sum[BLOCK_COLUMNS]{}, product[BLOCK_COLUMNS]{};
      for (int64_t k = 0; k < n; ++k) {
        const T *__restrict row = x[i + k] + j, *__restrict g = grad[i + k] + j;
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c) {
          const A value = A(g[c]);
          sum[c] += value, product[c] += value * (A(row[c]) - center[j + c]);
        }
      }
      for (int64_t c = 0; c < columns; ++c) sums[j + c] += double(sum[c]), products[j + c] += double(product[c]);
    });
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
  for_row_units(op.rows, parallel, [&](int64_t, int64_t begin, int64_t end) {
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
