// Backward of GATv2's attention. It walks by destination first: a source's row is gathered once for the score, for the
// product with the gradient of the output, and for the gradients of query, edge and att. What the second walk, by source,
// needs of an edge is left in a buffer, two numbers for each head: it gathers rows of gradients and queries and no longer
// multiplies any with each other.

template <class T, class I>
struct QueryGradBody {
  using A = Acc<T>;
  using State = A*;

  Edges<Score::gatv2, T, I> edges;
  const AttentionGrad& op;
  A* left;  // [edges, heads, 2]: the coefficient, times the factor of dropout, and the gradient of the score
  std::vector<double> d_att{};  // a row for each unit, so that it is summed in the same order by any number of threads
  const I* col = static_cast<const I*>(edges.op.csr.col);
  Rows<const A> peak = typed<A>(op.peak), total = typed<A>(op.total), inner = typed<A>(op.inner);
  Rows<const T> grad = typed<T>(op.grad);
  Rows<A> d_query = typed<A>(op.d_query), d_edge = typed<A>(op.d_edge);
  const int64_t C = edges.C, H = edges.heads();

  State home(int64_t i) const { return d_query ? d_query[i] + edges.from * C : nullptr; }
  int64_t size() const { return H * C; }

  static constexpr int MANY = 16;  // edges at a time, whose rows are read three times

  void run(int64_t i, int64_t begin, int64_t end, State s, int64_t unit) {
    A weight[MANY], product[MANY], ds[MANY];
    const T* rows[MANY];
    for (int64_t e = begin; e < end; e += MANY) {
      const int n = int(std::min<int64_t>(MANY, end - e));
      for (int64_t h = 0; h < H; ++h) {
        const int64_t head = edges.from + h;
        for (int k = 0; k < n; ++k) rows[k] = edges.values(col[e + k]) + h * C;
        for (int q = 0; q < n; q += 4) {
          const int m = std::min(4, n - q);
          const int64_t ahead = e + q + AHEAD;
          if (h == 0) prefetch(edges.value, col, ahead, std::min(ahead + m, edges.op.csr.edges), edges.from * C, edges.width());
          edges.scores(weight + q, col + e + q, i, e + q, m, head);
          dot_rows<A>(product + q, grad[i] + head * C, rows + q, m, C);
        }
        const A most = peak[i][head], sum = total[i][head], mean = inner[i][head];
#pragma omp simd
        for (int k = 0; k < n; ++k) weight[k] = exponential(weight[k] - most) / sum;
        for (int k = 0; k < n; ++k) {
          const A factor = edges.dropout ? edges.dropout(e + k, head) : A(1);
          // Next to a coefficient of 1 all others are 0: no gradient passes its score, though rounding may leave a
          // difference of two large products.
          ds[k] = (weight[k] == 1 ? A(0) : weight[k]) * (factor * product[k] - mean);
          A* out = left + ((e + k) * H + h) * 2;
          out[0] = weight[k] * factor, out[1] = ds[k];
        }
        columns(s == nullptr ? nullptr : s + h * C, d_att.data() + (unit * H + h) * C, rows, i, e, head, ds, n);
      }
    }
  }

  // The gradients of a query, of att and of the rows of edges, given those of the scores.
  void columns(A* query, double* att, const T* const* keys, int64_t i, int64_t e, int64_t head, const A* ds, int n) const {
    const T* q = edges.query[i] + head * C;
    const A *a = edges.att + head * C, p = A(edges.op.parameter);
    // A vector at column c, or a number of rows that do not fill a vector.
    const auto column = [&]<class V>(int64_t c, V, auto read, auto keep) {
      V slopes{}, products{};
      const V z = read(q + c), weight = read(a + c);
      for (int k = 0; k < n; ++k) {
        V t = read(keys[k] + c) + z;
        if (edges.edge) t += read(edges.edge[e + k] + head * C + c);
        const V d = keep(t > 0 ? V{} + ds[k] : V{} + ds[k] * p);
        slopes += d, products += d * t;
        if (d_edge) add_to(d_edge[e + k] + head * C + c, d * weight);
      }
      if (query != nullptr) add_to(query + c, slopes * weight);
      add_to(att + c, products);
    };
    const auto number = [](const auto* row) { return A(*row); };
    const auto vector = [](const auto* row) { return load(row); };
    const auto all = [](auto d) { return d; };
    const Tail<A> tail(C);
    int64_t c = 0;
    if (C < lanes<A>)
      for (; c < C; ++c) column(c, A(0), number, all);
    for (; c + lanes<A> <= C; c += lanes<A>) column(c, Vector<A>{}, vector, all);
    if (c < C) column(C - lanes<A>, Vector<A>{}, vector, tail);
  }

  static void add_to(A* y, A x) { *y += x; }
  static void add_to(A* y, Vector<A> x) { store<A>(y, load(y) + x); }
  template <class D>
    requires(!std::is_same_v<D, A>)
  static void add_to(D* y, A x) { *y += x; }
  template <class D>
    requires(!std::is_same_v<D, A>)
  static void add_to(D* y, Vector<A> x) {
#pragma omp simd
    for (int64_t l = 0; l < lanes<A>; ++l) y[l] += D(x[l]);
  }
};

template <class T, class I>
struct ValueGradBody {
  using A = Acc<T>;
  using State = A*;

  Edges<Score::gatv2, T, I> edges;
  const AttentionGrad& op;
  const A* left;
  const I* dst = static_cast<const I*>(op.transpose.col);
  const I* perm = static_cast<const I*>(op.transpose.perm);
  Rows<const T> grad = typed<T>(op.grad);
  Rows<A> d_value = typed<A>(op.d_value);
  const int64_t C = edges.C, H = edges.heads();

  State home(int64_t j) const { return d_value[j] + edges.from * C; }
  int64_t size() const { return H * C; }

  void run(int64_t j, int64_t begin, int64_t end, State s, int64_t) const {
    for (int64_t t = begin; t < end;) {
      const int n = end - t < 4 ? 1 : 4;
      const int64_t ahead = t + AHEAD, last = std::min(ahead + n, op.transpose.edges);
      prefetch(grad, dst, ahead, last, edges.from * C, H * C);
      prefetch(edges.query, dst, ahead, last, edges.from * C, H * C);
      for (int64_t k = ahead; k < last; ++k) __builtin_prefetch(left + int64_t(perm[k]) * H * 2);
      for (int64_t h = 0; h < H; ++h) n == 1 ? some<1>(s + h * C, j, t, h) : some<4>(s + h * C, j, t, h);
      t += n;
    }
  }

  // y += sum_t alpha_t g_t + att * sum_t ds_t LeakyReLU'(key_j + query_t + edge_t), over n edges
  template <int n>
  void some(A* __restrict y, int64_t j, int64_t t, int64_t h) const {
    const int64_t at = (edges.from + h) * C;
    const T *key = edges.key[j] + at, *g[n], *query[n], *edge[n];
    const A *att = edges.att + at, p = A(edges.op.parameter);
    A alpha[n], ds[n];
    unrolled<n>([&](int k) {
      const int64_t i = dst[t + k], e = perm[t + k];
      const A* numbers = left + (e * H + h) * 2;
      alpha[k] = numbers[0], ds[k] = numbers[1];
      g[k] = grad[i] + at, query[k] = edges.query[i] + at, edge[k] = edges.edge ? edges.edge[e] + at : nullptr;
    });
    if (C < lanes<A>) {
      for (int64_t c = 0; c < C; ++c)
        unrolled<n>([&](int k) {
          const A t = A(key[c]) + A(query[k][c]) + (edge[k] == nullptr ? A(0) : A(edge[k][c]));
          y[c] += alpha[k] * A(g[k][c]) + ds[k] * att[c] * (t > 0 ? A(1) : p);
        });
      return;
    }
    add(y, C, Tail<A>(C), [&](int64_t c) {
      const Vector<A> z = load(key + c);
      Vector<A> values{}, slopes{};
      unrolled<n>([&](int k) {
        Vector<A> t = z + load(query[k] + c);
        if (edge[k] != nullptr) t += load(edge[k] + c);
        slopes += t > 0 ? Vector<A>{} + ds[k] : Vector<A>{} + ds[k] * p;
        values += alpha[k] * load(g[k] + c);
      });
      return values + load(att + c) * slopes;
    });
  }
};

template <class T, class I>
void gatv2_grad(const AttentionGrad& op, Parallel parallel) {
  using A = Acc<T>;
  const Dropout<A> dropout = dropout_of<A>(op.forward);
  const Attention& forward = op.forward;
  const int64_t tile = group<T>(forward), C = forward.channels, dsts = forward.csr.all;
  const int64_t step = (tile + 1) / 2;  // half of the others' heads at a time, as an edge leaves two numbers
  const std::unique_ptr<A[]> left(new A[forward.csr.edges * step * 2]);
  Tile<T> first, second;
  for (int64_t from = 0; from < forward.heads; from += step) {
    const int64_t to = std::min(from + step, forward.heads);
    const Edges<Score::gatv2, T, I> edges{forward, dropout, from, to};
    {
      QueryGradBody<T, I> body{edges, op, left.get()};
      if (tile < forward.heads)
        body.edges.value = body.edges.key = first.copy(edges.key, forward.num_src, from * C, to * C, parallel);
      Walk<I, A, QueryGradBody<T, I>> walk(forward.csr, body);
      body.d_att.assign(walk.units() * edges.width(), 0.0);
      walk.run(parallel);
      for (int64_t k = 0; op.d_att != nullptr && k < edges.width(); ++k) {
        double sum = 0;
        for (int64_t u = 0; u < walk.units(); ++u) sum += body.d_att[u * edges.width() + k];
        static_cast<A*>(op.d_att)[from * C + k] += A(sum);
      }
    }
    ValueGradBody<T, I> body{edges, op, left.get()};
    if (tile < forward.heads) {
      const auto at = [&](int64_t k) { return forward.csr.at<I>(k); };
      body.grad = first.copy(body.grad, dsts, forward.csr.rows, at, from * C, to * C, parallel);
      body.edges.query = second.copy(edges.query, dsts, forward.csr.rows, at, from * C, to * C, parallel);
    }
    Walk<I, A, ValueGradBody<T, I>>(op.transpose, body).run(parallel);
  }
}
