// best[i] = max (or min) over e in i of x[col[e]], with the number of edges that attain it, and the gradient of x.

template <class T, class I>
struct ExtremumBody {
  using A = Acc<T>;
  struct State {
    A *best, *count;
  };

  const Extremum& op;
  Rows<A> best, count;  // over all blocks so far
  const I* col = static_cast<const I*>(op.csr.col);
  Rows<const T> x = typed<T>(op.x);

  State home(int64_t i) const { return {best[i], count[i]}; }
  int64_t size() const { return 2 * op.width; }
  State part(A* p) const { return {p, p + op.width}; }
  void clear(State s) const {
    std::fill_n(s.best, op.width, -std::numeric_limits<A>::infinity());
    std::fill_n(s.count, op.width, A(0));
  }
  void merge(int64_t, State into, State s) const {
    for (int64_t j = 0; j < op.width; ++j) update(into.best[j], into.count[j], s.best[j], s.count[j]);
  }

  // A NaN is larger than everything and equal to nothing.
  static void update(A& best, A& count, A value, A times) {
    const bool larger = !(value <= best) && best == best;
    count = larger ? (value == value ? times : A(0)) : count + (value == best ? times : A(0));
    best = larger ? value : best;
  }

  void run(int64_t, int64_t begin, int64_t end, State s, int64_t) const {
    const A sign = op.largest ? 1 : -1;
    for (int64_t e = begin; e < end; ++e) {
      if (e + AHEAD < op.csr.edges) prefetch(x[col[e + AHEAD]], op.width);
      const T* __restrict row = x[col[e]];
      A *__restrict best = s.best, *__restrict count = s.count;
#pragma omp simd
      for (int64_t j = 0; j < op.width; ++j) update(best[j], count[j], sign * A(row[j]), A(1));
    }
  }
};

template <class T, class I>
void extremum(const Extremum& op, Parallel parallel) {
  using A = Acc<T>;
  ExtremumBody<T, I> body{op, typed<A>(op.best), typed<A>(op.count)};
  Walk<I, A, ExtremumBody<T, I>>(op.csr, body).run(parallel);
}

template <class T, class I>
struct ExtremumGradBody {
  using A = Acc<T>;
  using State = A*;

  const ExtremumGrad& op;
  const I* col = static_cast<const I*>(op.csr.col);
  Rows<const T> x = typed<T>(op.x), best = typed<T>(op.best), share = typed<T>(op.share);
  Rows<A> out = typed<A>(op.out);

  State home(int64_t i) const { return out[i]; }
  int64_t size() const { return op.width; }

  void run(int64_t i, int64_t begin, int64_t end, State s, int64_t) const {
    const T* __restrict own = x[i];
    A* __restrict sum = s;
    for (int64_t e = begin; e < end; ++e) {
      if (e + AHEAD < op.csr.edges) {
        prefetch(best[col[e + AHEAD]], op.width);
        prefetch(share[col[e + AHEAD]], op.width);
      }
      const T *__restrict most = best[col[e]], *__restrict part = share[col[e]];
#pragma omp simd
      for (int64_t j = 0; j < op.width; ++j) sum[j] += (A(own[j]) == A(most[j]) ? A(1) : A(0)) * A(part[j]);  // NaN stays
    }
  }
};

template <class T, class I>
void extremum_grad(const ExtremumGrad& op, Parallel parallel) {
  ExtremumGradBody<T, I> body{op};
  Walk<I, Acc<T>, ExtremumGradBody<T, I>>(op.csr, body).run(parallel);
}
