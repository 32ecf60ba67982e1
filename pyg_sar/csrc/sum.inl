// out[i] += sum over e in i of w[e] x[col[e]], and the gradient of w.

constexpr int CHUNK = 32;   // edges at a time
constexpr int AHEAD = 12;   // rows prefetched before they are read

template <class T, class I>
struct SumBody {
  using A = Acc<T>;
  using State = A*;

  const Sum& op;
  const I* col = static_cast<const I*>(op.csr.col);
  const I* perm = static_cast<const I*>(op.csr.perm);
  Rows<const T> x = typed<T>(op.x);
  Rows<const A> weight = typed<A>(op.weight);
  Rows<A> out = typed<A>(op.out);
  int64_t from = 0, to = 0;  // columns: a range of heads, or of channels if there is a single head

  State home(int64_t i) const { return out[i] + (op.same_out ? 0 : from); }
  int64_t size() const { return op.same_out ? op.channels : to - from; }

  // y += the rows of edges, in `n` vectors of columns from `j` on, whose sums stay in registers, and in the rest of the row.
  template <int n, bool rest>
  [[gnu::noinline]] void add_columns(A* y, int64_t j, int64_t begin, int64_t end, const Tail<A>& tail) const {
    const int64_t last = to - from - lanes<A>;
    Vector<A> sum[n], more{};
    unrolled<n>([&](int v) { sum[v] = load(y + j + v * lanes<A>); });
    if (rest) more = load(y + last);
    int64_t e = begin;
    for (; e + 4 <= end; e += 4) {
      if (j == 0) prefetch(x, col, e + AHEAD, std::min(e + AHEAD + 4, op.csr.edges), from, to - from);
      const T *a = x[col[e]] + from, *b = x[col[e + 1]] + from, *c = x[col[e + 2]] + from, *d = x[col[e + 3]] + from;
      const auto four = [=](int64_t at) { return (load(a + at) + load(b + at)) + (load(c + at) + load(d + at)); };
      unrolled<n>([&](int v) { sum[v] += four(j + v * lanes<A>); });
      if (rest) more += tail(four(last));
    }
    for (; e < end; ++e) {
      if (j == 0) prefetch(x, col, e + AHEAD, std::min(e + AHEAD + 1, op.csr.edges), from, to - from);
      const T* a = x[col[e]] + from;
      unrolled<n>([&](int v) { sum[v] += load(a + j + v * lanes<A>); });
      if (rest) more += tail(load(a + last));
    }
    if (rest) store<A>(y + last, more);  // of its first columns, those above are right
    unrolled<n>([&](int v) { store<A>(y + j + v * lanes<A>, sum[v]); });
  }

  void add_all(A* y, int64_t begin, int64_t end) const {
    constexpr int most = 8;  // vectors, for which there are registers everywhere
    const Tail<A> tail(to - from);
    int64_t j = 0, left = (to - from) / lanes<A>;
    for (int64_t e = left > 0 ? end : begin; e < end; ++e) {  // rows that fill no vector
      prefetch(x, col, e + AHEAD, std::min(e + AHEAD + 1, op.csr.edges), from, to - from);
      for (int64_t k = 0; k < to - from; ++k) y[k] += A(x[col[e]][from + k]);
    }
    for (; left > most; left -= most, j += most * lanes<A>) add_columns<most, false>(y, j, begin, end, tail);
    const auto add_last = [&]<int n>(std::integral_constant<int, n>) {
      if (left != n) return;
      tail ? add_columns<n, true>(y, j, begin, end, tail) : add_columns<n, false>(y, j, begin, end, tail);
    };
    [&]<int... k>(std::integer_sequence<int, k...>) {
      (add_last(std::integral_constant<int, k + 1>()), ...);
    }(std::make_integer_sequence<int, most>());
  }

  void run(int64_t, int64_t begin, int64_t end, State s, int64_t) const {
    if (!weight) return add_all(s, begin, end);
    const int64_t channels = std::min(op.channels, to - from), first = op.same_x ? 0 : from;
    const int64_t touched = op.same_x ? channels : to - from;
    const T* rows[4];
    A w[4];
    for (int64_t e = begin; e < end; e += 4) {
      const int n = int(std::min<int64_t>(4, end - e));
      for (int64_t k = e + AHEAD; k < std::min(e + AHEAD + n, op.csr.edges); ++k) prefetch(x[col[k]] + first, touched);
      for (int64_t j = from; j < to; j += channels) {
        for (int k = 0; k < n; ++k) {
          rows[k] = x[col[e + k]] + (op.same_x ? 0 : j);
          w[k] = weight[perm ? int64_t(perm[e + k]) : e + k][j / op.channels];
        }
        add_rows<A>(s + (op.same_out ? 0 : j - from), rows, w, n, channels);
      }
    }
  }
};

// Writes each sum once, rounded to the type of x.
template <class T, class I>
struct OnceSumBody : SumBody<T, I> {
  // Whether rows go past the caches, where together they would take the place of what is gathered.
  bool streams() const {
    const int64_t bytes = this->op.out.stride * sizeof(T), start = int64_t(uintptr_t(this->op.out.data) + this->from * sizeof(T));
    return this->op.csr.rows * bytes >= 8 << 20 && bytes % 16 == 0 && start % 16 == 0;
  }

  void emit(int64_t i, typename SumBody<T, I>::State s) const {
    T* y = typed<T>(this->op.out)[i] + (this->op.same_out ? 0 : this->from);
    if (past) return stream(y, s, this->size());
    for (int64_t j = 0; j < this->size(); ++j) y[j] = T(s[j]);
  }

  bool past = false;
};

template <class T, class I>
void sum(const Sum& op, Parallel parallel) {
  const int64_t width = op.heads * op.channels;
  const bool whole = op.same_x || (op.once && op.same_out);  // no row may be written twice
  int64_t step = whole ? width : tile_columns(op.csr, op.num_cols, width, sizeof(T));
  if (op.heads > 1) step = std::max<int64_t>(step / op.channels, 1) * op.channels;
  OnceSumBody<T, I> body{{op}};
  Tile<T> tile;
  for (int64_t from = 0; from < width; from += step) {
    body.from = from, body.to = std::min(from + step, width), body.past = body.streams();
    if (step < width) body.x = tile.copy(typed<T>(op.x), op.num_cols, from, body.to, parallel);
    if (op.once) {
      Walk<I, Acc<T>, OnceSumBody<T, I>>(op.csr, body).run(parallel);
    } else {
      Walk<I, Acc<T>, SumBody<T, I>>(op.csr, body).run(parallel);
    }
  }
}

template <class T, class I>
struct ProductBody {
  using A = Acc<T>;
  using State = A*;

  const Product& op;
  const I* col = static_cast<const I*>(op.csr.col);
  Rows<const T> y = typed<T>(op.y), x = typed<T>(op.x);
  Rows<A> out = typed<A>(op.out);

  State home(int64_t) const { return nullptr; }
  int64_t size() const { return 0; }

  void run(int64_t i, int64_t begin, int64_t end, State, int64_t) const {
    const int64_t width = op.same_x ? op.channels : op.heads * op.channels;
    const T* rows[4];
    A products[4];
    for (int64_t e = begin; e < end; e += 4) {
      const int n = int(std::min<int64_t>(4, end - e));
      for (int64_t k = e + AHEAD; k < std::min(e + AHEAD + n, op.csr.edges); ++k) prefetch(x[col[k]], width);
      for (int64_t h = 0; h < op.heads; ++h) {
        for (int k = 0; k < n; ++k) rows[k] = x[col[e + k]] + (op.same_x ? 0 : h * op.channels);
        dot_rows<A>(products, y[i] + h * op.channels, rows, n, op.channels);
        for (int k = 0; k < n; ++k) out[e + k][h] = products[k];
      }
    }
  }
};

template <class T, class I>
void product(const Product& op, Parallel parallel) {
  ProductBody<T, I> body{op};
  Walk<I, Acc<T>, ProductBody<T, I>>(op.csr, body).run(parallel);
}
