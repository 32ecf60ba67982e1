// One online softmax over the in-edges of each destination, forward and backward, for three kinds of scores:
//
//   additive (GAT)     s = LeakyReLU(key_j + query_i + edge_ij)               one number for each head
//   gatv2              s = <att, LeakyReLU(value_j + query_i + edge_ij)>      rows
//   dot (Transformer)  s = parameter <query_i, key_j + edge_ij>               rows; edge_ij is added to the value, too
//
// No coefficient is written to memory in the forward pass. Backward of the first and the last kind walks by source: an
// edge's row of the output's gradient is read once for both the product with the source's value and the value's gradient;
// the gradients of the scores go to a buffer of one number for each edge and head of a tile (two where a dot product has
// edge rows), from which a second walk, by destination, makes the gradients of queries and edges. Of additive scores with
// all edges in one block (`alone`) `inner`, the product of output and gradient, is made of what the first walk writes; the
// second walk finishes the gradients of the scores, a third adds them to those of keys. Then nobody needs the output, and
// the values become their own gradient, row by row. Backward of gatv2 stands in gatv2.inl.
//
// Backward makes the scores again, to the last digit, on which coefficients depend where scores are large: a score is
// written to memory before anything is subtracted from it, and no loop that makes one is compiled twice.

constexpr int GROUP = 16;  // heads at a time, at most

template <class A>
Dropout<A> dropout_of(const Attention& op) {
  return {op.e_id, op.seed, op.dropout, op.head, op.heads};
}

// What both passes read of a block, for the heads [from, to).
template <Score S, class T, class I>
struct Edges {
  using A = Acc<T>;

  const Attention& op;
  const Dropout<A>& dropout;
  int64_t from = 0, to = 0;
  Rows<const T> key = typed<T>(op.key), value = typed<T>(op.value);
  Rows<const T> query = typed<T>(op.query), edge = typed<T>(op.edge);
  const A* att = static_cast<const A*>(op.att);
  const int64_t C = op.channels;

  int64_t heads() const { return to - from; }
  int64_t width() const { return heads() * C; }
  const T* values(int64_t j) const { return value[j] + from * C; }

  // The heads at hand of what is gathered by source, side by side.
  void copy_sources(Tile<T>& keys, Tile<T>& values, Parallel parallel) {
    const int64_t scale = S == Score::additive ? 1 : C;
    value = values.copy(value, op.num_src, from * C, to * C, parallel);
    key = S == Score::gatv2 ? value : keys.copy(key, op.num_src, from * scale, to * scale, parallel);
  }

  static A leaky(A t, A slope) { return t > 0 ? t : slope * t; }

  // The argument of the LeakyReLU of an additive score.
  A sum(int64_t j, A query, int64_t e, int64_t h) const {
    return A(key[j][h]) + query + (edge ? A(edge[e][h]) : A(0));
  }

  [[gnu::noinline]] static A narrow(const A* a, const T* k, const T* q, const T* b, int64_t C, A p) {
    A s = 0;
    for (int64_t c = 0; c < C; ++c) s += a[c] * leaky(A(k[c]) + A(q[c]) + (b == nullptr ? A(0) : A(b[c])), p);
    return s;
  }

  // Scores of GATv2 of `n` rows of keys, and of edges if there are any.
  template <int n>
  static void wide(A* s, const A* a, const T* const* k, const T* q, const T* const* b, int64_t C, A p) {
    const Tail<A> tail(C);
    const auto term = [=](int64_t c, int r) {
      Vector<A> t = load(k[r] + c) + load(q + c);
      if (b != nullptr) t += load(b[r] + c);
      return load(a + c) * (t > 0 ? t : p * t);
    };
    Vector<A> sum[n]{};
    for (int64_t c = 0; c + lanes<A> <= C; c += lanes<A>) unrolled<n>([&](int r) { sum[r] += term(c, r); });
    if (tail) unrolled<n>([&](int r) { sum[r] += tail(term(C - lanes<A>, r)); });
    unrolled<n>([&](int r) { s[r] = total(sum[r]); });
  }

  // Not inlined: both passes run the same loop.
  [[gnu::noinline]] static void gatv2(A* s, const A* a, const T* const* k, const T* q, const T* const* b, int n, int64_t C, A p) {
    int r = 0;
    if (C < lanes<A>) {
      for (; r < n; ++r) s[r] = narrow(a, k[r], q, b == nullptr ? nullptr : b[r], C, p);
      return;
    }
    for (; r + 4 <= n; r += 4) wide<4>(s + r, a, k + r, q, b == nullptr ? nullptr : b + r, C, p);
    for (; r < n; ++r) wide<1>(s + r, a, k + r, q, b == nullptr ? nullptr : b + r, C, p);
  }

  // The scores of the edges e, e + 1, ..., CHUNK at most, from the sources j[0], j[1], ... to destination i; additive ones
  // are still without their LeakyReLU.
  void scores(A* s, const I* j, int64_t i, int64_t e, int n, int64_t h) const {
    const A p = A(op.parameter);
    if constexpr (S == Score::additive) {
      const A q = query ? A(query[i][h]) : A(0);
      for (int k = 0; k < n; ++k) s[k] = sum(j[k], q, e + k, h);
      return;
    }
    const T *keys[CHUNK], *features[CHUNK], *q = query[i] + h * C;
    for (int k = 0; k < n; ++k) keys[k] = key[j[k]] + h * C, features[k] = edge ? edge[e + k] + h * C : nullptr;
    if constexpr (S == Score::gatv2) {
      gatv2(s, att + h * C, keys, q, edge ? features : nullptr, n, C, p);
    } else {
      dot_rows<A>(s, q, keys, n, C);
      for (int k = 0; k < n; ++k) s[k] = p * (s[k] + (edge ? dot<A>(q, features[k], C) : A(0)));
    }
  }
};

template <Score S, class T, class I>
struct AttentionBody {
  using A = Acc<T>;
  struct State {
    A *peak, *total, *out;
  };

  Edges<S, T, I> edges;
  const Attention& op = edges.op;
  const I* col = static_cast<const I*>(op.csr.col);
  Rows<A> peak = typed<A>(op.peak), total = typed<A>(op.total), out = typed<A>(op.out);

  State home(int64_t i) const { return {peak[i] + edges.from, total[i] + edges.from, out[i] + edges.from * op.channels}; }
  int64_t size() const { return edges.heads() * (2 + op.channels); }
  State part(A* p) const { return {p, p + edges.heads(), p + 2 * edges.heads()}; }
  void clear(State s) const {
    std::fill_n(s.peak, edges.heads(), -std::numeric_limits<A>::infinity());
    std::fill_n(s.total, edges.heads() * (1 + op.channels), A(0));
  }

  // Moves a head of a state to a larger peak; returns what exponents are taken relative to.
  A raise(State s, int64_t h, A peak) const {
    const A anchor = peak == -std::numeric_limits<A>::infinity() ? A(0) : peak;  // nothing but masked edges so far
    if (peak != s.peak[h]) {
      const A decay = exponential(s.peak[h] - anchor);
      s.peak[h] = peak;
      s.total[h] *= decay;
      A* o = s.out + h * op.channels;
      for (int64_t c = 0; c < op.channels; ++c) o[c] *= decay;
    }
    return anchor;
  }

  void merge(int64_t, State into, State s) const {
    for (int64_t h = 0; h < edges.heads(); ++h) {
      const A anchor = raise(into, h, std::max(into.peak[h], s.peak[h]));
      const A decay = exponential(s.peak[h] - anchor);
      into.total[h] += s.total[h] * decay;
      for (int64_t c = 0; c < op.channels; ++c) into.out[h * op.channels + c] += s.out[h * op.channels + c] * decay;
    }
  }

  void run(int64_t i, int64_t begin, int64_t end, State s, int64_t) const {
    A weight[GROUP][CHUNK];
    const T* rows[CHUNK];
    const int64_t C = op.channels;
    const A parameter = A(op.parameter);
    for (int64_t e = begin; e < end; e += CHUNK) {
      const int n = int(std::min<int64_t>(CHUNK, end - e));
      // Rows of keys are asked for some edges before they are read.
      constexpr int some = S == Score::additive ? CHUNK : 4;
      for (int q = 0; q < n; q += some) {
        const int m = std::min(some, n - q);
        const int64_t ahead = e + q + AHEAD, last = std::min(ahead + m, op.csr.edges);
        if (S != Score::additive) prefetch(edges.key, col, ahead, last, edges.from * C, edges.width());
        for (int64_t h = 0; h < edges.heads(); ++h) edges.scores(weight[h] + q, col + e + q, i, e + q, m, edges.from + h);
      }
      for (int64_t h = 0; h < edges.heads(); ++h) {
        A* w = weight[h];
        if constexpr (S == Score::additive) {
#pragma omp simd
          for (int k = 0; k < n; ++k) w[k] = edges.leaky(w[k], parameter);
        }
        A most = s.peak[h];
        for (int k = 0; k < n; ++k) most = w[k] > most ? w[k] : most;
        const A anchor = raise(s, h, most);
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < n; ++k) sum += w[k] = exponential(w[k] - anchor);
        s.total[h] += sum;
        if (edges.dropout)
          for (int k = 0; k < n; ++k) w[k] *= edges.dropout(e + k, edges.from + h);
      }
      for (int q = 0; q < n; q += 4) {
        const int m = std::min(4, n - q);
        const int64_t ahead = e + q + AHEAD, last = std::min(ahead + m, op.csr.edges);
        if (S != Score::gatv2) prefetch(edges.value, col, ahead, last, edges.from * C, edges.width());
        for (int k = q; k < q + m; ++k) rows[k] = edges.values(col[e + k]);
        for (int64_t h = 0; h < edges.heads(); ++h) {
          add_rows<A>(s.out + h * C, rows + q, weight[h] + q, m, C);
          for (int k = q; k < q + m; ++k) rows[k] += C;
        }
        if (S == Score::dot && edges.edge) {
          for (int k = q; k < q + m; ++k) rows[k] = edges.edge[e + k] + edges.from * C;
          for (int64_t h = 0; h < edges.heads(); ++h) {
            add_rows<A>(s.out + h * C, rows + q, weight[h] + q, m, C);
            for (int k = q; k < q + m; ++k) rows[k] += C;
          }
        }
      }
    }
  }
};

// Heads at a time.
template <class T>
int64_t group(const Attention& op) {
  const int64_t columns = tile_columns(op.csr, op.num_src, op.heads * op.channels, sizeof(T));
  return std::clamp<int64_t>(columns / std::max<int64_t>(op.channels, 1), 1, std::min<int64_t>(op.heads, GROUP));
}

template <Score S, class T, class I>
void attend(const Attention& op, Parallel parallel) {
  const Dropout<Acc<T>> dropout = dropout_of<Acc<T>>(op);
  const int64_t step = group<T>(op);
  Tile<T> keys, values;
  for (int64_t from = 0; from < op.heads; from += step) {
    Edges<S, T, I> edges{op, dropout, from, std::min(from + step, op.heads)};
    if (step < op.heads) edges.copy_sources(keys, values, parallel);
    AttentionBody<S, T, I> body{edges};
    Walk<I, Acc<T>, AttentionBody<S, T, I>>(op.csr, body).run(parallel);
  }
}

// By source: the gradients of keys and values, and of the scores.
template <Score S, class T, class I>
struct SourceGradBody {
  using A = Acc<T>;
  struct State {
    A *key, *value;
  };

  Edges<S, T, I> edges;
  const AttentionGrad& op;
  A* d_score;           // [edges, heads], in the order of destinations
  A* alpha;             // the same for the coefficients, or null
  const A* destination; // peak, total, inner and query (if additive) of each destination
  const I* dst = static_cast<const I*>(op.transpose.col);
  const I* perm = static_cast<const I*>(op.transpose.perm);
  Rows<const T> grad = typed<T>(op.grad);
  Rows<A> d_key = typed<A>(op.d_key), d_value = typed<A>(op.d_value);
  const int64_t C = edges.C, H = edges.heads();

  static constexpr int64_t facts = S == Score::additive ? 4 : 3;
  // `alone` keys come later.
  int64_t keys() const { return op.alone ? 0 : S == Score::additive ? H : H * C; }

  State home(int64_t j) const {
    return {keys() == 0 ? nullptr : d_key[j] + (S == Score::dot ? edges.from * C : edges.from), d_value[j] + edges.from * C};
  }
  int64_t size() const { return keys() + H * C; }
  State part(A* p) const { return {p, p + keys()}; }
  void clear(State s) const {
    std::fill_n(s.key, keys(), A(0));
    std::fill_n(s.value, H * C, A(0));
  }
  void merge(int64_t, State into, State s) const {
    for (int64_t k = 0; k < keys(); ++k) into.key[k] += s.key[k];
    for (int64_t k = 0; k < H * C; ++k) into.value[k] += s.value[k];
  }

  void run(int64_t j, int64_t begin, int64_t end, State s, int64_t) const {
    constexpr int SHORT = 16;  // the rows are read twice in a chunk
    A weight[SHORT], slope[SHORT], ds[SHORT], factor[SHORT], peak[SHORT], total[SHORT], inner[SHORT];
    const T* rows[SHORT];
    const A parameter = A(edges.op.parameter);
    for (int64_t t = begin; t < end; t += SHORT) {
      const int n = int(std::min<int64_t>(SHORT, end - t));
      for (int64_t k = t + SHORT; k < std::min<int64_t>(t + SHORT + n, op.transpose.edges); ++k) {
        prefetch(grad[dst[k]] + edges.from * C, H * C);
        if (S == Score::dot) prefetch(edges.query[dst[k]] + edges.from * C, H * C);
        __builtin_prefetch(d_score + int64_t(perm[k]) * H, 1);
      }
      for (int64_t h = 0; h < H; ++h) {
        const int64_t head = edges.from + h;
        if constexpr (S == Score::dot) {
          for (int k = 0; k < n; ++k) rows[k] = edges.query[dst[t + k]] + head * C;
          dot_rows<A>(weight, edges.key[j] + head * C, rows, n, C);
        }
        for (int k = 0; k < n; ++k) rows[k] = grad[dst[t + k]] + head * C;
        dot_rows<A>(inner, edges.values(j) + h * C, rows, n, C);
        for (int k = 0; k < n; ++k) {
          const int64_t i = dst[t + k], e = perm[t + k];
          const A* fact = destination + (i * H + h) * facts;
          peak[k] = fact[0], total[k] = fact[1], ds[k] = fact[2];
          if constexpr (S == Score::additive) weight[k] = edges.sum(j, fact[3], e, head);
          if constexpr (S == Score::dot) {
            const T* b = edges.edge ? edges.edge[e] + head * C : nullptr;
            weight[k] = parameter * (weight[k] + (b == nullptr ? A(0) : dot<A>(edges.query[i] + head * C, b, C)));
            if (b != nullptr) inner[k] += dot<A>(rows[k], b, C);
          }
        }
        if constexpr (S == Score::additive) {
#pragma omp simd
          for (int k = 0; k < n; ++k) {
            slope[k] = weight[k] > 0 ? A(1) : parameter;
            weight[k] = edges.leaky(weight[k], parameter);
          }
        }
#pragma omp simd
        for (int k = 0; k < n; ++k) weight[k] = exponential(weight[k] - peak[k]);
        for (int k = 0; k < n; ++k) factor[k] = edges.dropout ? edges.dropout(perm[t + k], head) : A(1);
#pragma omp simd
        for (int k = 0; k < n; ++k) {
          const A alpha = weight[k] / total[k];
          // Next to a coefficient of 1 all others are 0: no gradient passes its score, though rounding may leave a
          // difference of two large products.
          ds[k] = op.alone ? weight[k] * (factor[k] * inner[k]) : (alpha == 1 ? A(0) : alpha) * (factor[k] * inner[k] - ds[k]);
          weight[k] = alpha * factor[k];
        }
        if (S == Score::additive && !op.alone) {
          A sum = 0;
          for (int k = 0; k < n; ++k) sum += ds[k] *= slope[k];
          s.key[h] += sum;
        }
        add_rows<A>(s.value + h * C, rows, weight, n, C);
        for (int k = 0; k < n; ++k) d_score[int64_t(perm[t + k]) * H + h] = ds[k];
        if (alpha != nullptr)
          for (int k = 0; k < n; ++k) alpha[int64_t(perm[t + k]) * H + h] = weight[k];
        if constexpr (S == Score::dot) {
          for (int k = 0; k < n; ++k) ds[k] *= parameter, rows[k] = edges.query[dst[t + k]] + head * C;
          add_rows<A>(s.key + h * C, rows, ds, n, C);
        }
      }
    }
  }
};

// Writes the gradient of a source's value over the value, which no other source reads.
template <Score S, class T, class I>
struct AloneSourceGradBody : SourceGradBody<S, T, I> {
  void emit(int64_t j, typename SourceGradBody<S, T, I>::State s) const {
    T* value = typed<T>(this->op.d_value)[j] + this->edges.from * this->C;
    for (int64_t c = 0; c < this->H * this->C; ++c) value[c] = T(s.value[c]);
  }
};

// s += the sum of the numbers of each head of the edges [begin, end), or of perm[begin], ... .
template <class A, class I>
inline void add_edges(A* s, const A* numbers, const I* perm, int64_t begin, int64_t end, int64_t heads) {
  for (int64_t h = 0; h < heads; ++h) {
    double sum = 0;  // an error of `inner` is that of all edges of a row
    if (perm == nullptr) {
#pragma omp simd reduction(+ : sum)
      for (int64_t e = begin; e < end; ++e) sum += numbers[e * heads + h];
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t) sum += numbers[int64_t(perm[t]) * heads + h];
    }
    s[h] += A(sum);
  }
}

// Sums of the gradients of scores by row, and by column where `perm` is that of the transpose.
template <class T, class I>
struct ScoreSumBody {
  using A = Acc<T>;
  using State = A*;

  const A* d_score;
  const I* perm;
  Rows<A> out;
  int64_t from, heads;

  State home(int64_t i) const { return out[i] + from; }
  int64_t size() const { return heads; }

  void run(int64_t, int64_t begin, int64_t end, State s, int64_t) const { add_edges(s, d_score, perm, begin, end, heads); }
};

// By destination: the gradients of queries and edges from those of the scores.
template <Score S, class T, class I>
struct DestinationGradBody {
  using A = Acc<T>;
  using State = A*;

  Edges<S, T, I> edges;
  const AttentionGrad& op;
  A* d_score;
  const A *alpha, *inner;  // inner of each destination and head, if scores are still to be finished
  const I* col = static_cast<const I*>(edges.op.csr.col);
  Rows<A> d_query = typed<A>(op.d_query), d_edge = typed<A>(op.d_edge);
  Rows<const T> grad = typed<T>(op.grad);
  const int64_t C = edges.C, H = edges.heads();

  int64_t scale() const { return S == Score::additive ? 1 : C; }
  State home(int64_t i) const { return d_query ? d_query[i] + edges.from * scale() : nullptr; }
  int64_t size() const { return H * scale(); }

  void run(int64_t i, int64_t begin, int64_t end, State s, int64_t) const {
    if constexpr (S == Score::additive) {
      for (int64_t h = 0; h < H && inner != nullptr; ++h) finish(i, begin, end, h);
      if (s != nullptr) add_edges<A, I>(s, d_score, nullptr, begin, end, H);
      for (int64_t e = begin; e < end && d_edge; ++e)
        for (int64_t h = 0; h < H; ++h) d_edge[e][edges.from + h] += d_score[e * H + h];
      return;
    }
    const A parameter = A(edges.op.parameter);
    const T* rows[4];
    A ds[4];
    for (int64_t e = begin; e < end; e += 4) {
      const int n = int(std::min<int64_t>(4, end - e));
      prefetch(edges.key, col, e + AHEAD, std::min(e + AHEAD + n, edges.op.csr.edges), edges.from * C, H * C);
      for (int64_t h = 0; h < H; ++h) {
        const int64_t at = (edges.from + h) * C;
        for (int k = 0; k < n; ++k) ds[k] = d_score[(e + k) * H + h] * parameter, rows[k] = edges.key[col[e + k]] + at;
        if (s != nullptr) add_rows<A>(s + h * C, rows, ds, n, C);
        if (s != nullptr && edges.edge) {
          for (int k = 0; k < n; ++k) rows[k] = edges.edge[e + k] + at;
          add_rows<A>(s + h * C, rows, ds, n, C);
        }
        for (int k = 0; k < n && d_edge; ++k) edge_grad(d_edge[e + k] + at, i, at, ds[k], alpha[(e + k) * H + h]);
      }
    }
  }

  // The gradient of an edge's row, which is added to the key and to the value.
  void edge_grad(A* __restrict y, int64_t i, int64_t at, A ds, A alpha) const {
    const T *__restrict q = edges.query[i] + at, *__restrict g = grad[i] + at;
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) y[c] += ds * A(q[c]) + alpha * A(g[c]);
  }

  // From d <g, v>, times the exponential, to the gradient of the argument of the LeakyReLU.
  void finish(int64_t i, int64_t begin, int64_t end, int64_t h) const {
    A score[CHUNK], slope[CHUNK];
    const int64_t head = edges.from + h;
    const A query = edges.query ? A(edges.query[i][head]) : A(0), parameter = A(edges.op.parameter);
    const A peak = typed<A>(op.peak)[i][head], total = typed<A>(op.total)[i][head], part = inner[i * H + h] / total;
    for (int64_t e = begin; e < end; e += CHUNK) {
      const int n = int(std::min<int64_t>(CHUNK, end - e));
      A* ds = d_score + e * H + h;
      for (int k = 0; k < n; ++k) score[k] = edges.sum(col[e + k], query, e + k, head);
#pragma omp simd
      for (int k = 0; k < n; ++k) {
        slope[k] = score[k] > 0 ? A(1) : parameter;
        score[k] = edges.leaky(score[k], parameter);
      }
#pragma omp simd
      for (int k = 0; k < n; ++k) ds[k * H] = (ds[k * H] - part * exponential(score[k] - peak)) / total * slope[k];
    }
  }
};

// What a source reads of each destination, side by side: an edge touches one line of memory for it.
template <Score S, class T, class I>
void collect(Acc<T>* facts, const AttentionGrad& op, const Edges<S, T, I>& edges, Parallel parallel) {
  using A = Acc<T>;
  constexpr int64_t n = SourceGradBody<S, T, I>::facts;
  const auto peak = typed<A>(op.peak), total = typed<A>(op.total), inner = typed<A>(op.inner);
  for_rows(op.forward.csr.rows, parallel, [&](int64_t k) {
    const int64_t i = op.forward.csr.at<I>(k);
    A* fact = facts + i * edges.heads() * n;
    for (int64_t h = edges.from; h < edges.to; ++h, fact += n) {
      fact[0] = peak[i][h], fact[1] = total[i][h], fact[2] = op.alone ? A(0) : inner[i][h];
      if constexpr (n == 4) fact[3] = edges.query ? A(edges.query[i][h]) : A(0);
    }
  });
}

template <Score S, class T, class I>
void attend_grad(const AttentionGrad& op, Parallel parallel) {
  using A = Acc<T>;
  const Dropout<A> dropout = dropout_of<A>(op.forward);
  const Attention& forward = op.forward;
  const int64_t step = group<T>(forward), C = forward.channels, dsts = forward.csr.all;
  const std::unique_ptr<A[]> d_score(new A[forward.csr.edges * step]);
  const std::unique_ptr<A[]> alpha(S == Score::dot && op.d_edge ? new A[forward.csr.edges * step] : nullptr);
  const std::unique_ptr<A[]> facts(new A[dsts * step * SourceGradBody<S, T, I>::facts]);
  const std::unique_ptr<A[]> inner(op.alone ? new A[dsts * step] : nullptr);
  Tile<T> keys, queries, grads;
  for (int64_t from = 0; from < forward.heads; from += step) {
    const int64_t to = std::min(from + step, forward.heads);
    Edges<S, T, I> edges{forward, dropout, from, to};
    collect(facts.get(), op, edges, parallel);
    {
      AloneSourceGradBody<S, T, I> body{{edges, op, d_score.get(), alpha.get(), facts.get()}};
      if (step < forward.heads) {
        const auto at = [&](int64_t k) { return forward.csr.at<I>(k); };
        const int64_t rows = forward.csr.rows;
        body.grad = grads.copy(body.grad, dsts, rows, at, from * C, to * C, parallel);
        if (S != Score::additive) body.edges.query = queries.copy(edges.query, dsts, rows, at, from * C, to * C, parallel);
      }
      if (op.alone) {
        Walk<I, A, AloneSourceGradBody<S, T, I>>(op.transpose, body).run(parallel);
      } else {
        Walk<I, A, SourceGradBody<S, T, I>>(op.transpose, body).run(parallel);
      }
    }
    if (op.alone) {
      std::fill_n(inner.get(), dsts * edges.heads(), A(0));
      ScoreSumBody<T, I> body{d_score.get(), nullptr, {inner.get(), edges.heads()}, 0, edges.heads()};
      Walk<I, A, ScoreSumBody<T, I>>(forward.csr, body).run(parallel);
    }
    if (!op.alone && !op.d_query && !op.d_edge) continue;
    if (step < forward.heads && S != Score::additive)
      edges.key = keys.copy(edges.key, forward.num_src, from * C, to * C, parallel);
    DestinationGradBody<S, T, I> body{edges, op, d_score.get(), alpha.get(), inner.get()};
    Walk<I, A, DestinationGradBody<S, T, I>>(forward.csr, body).run(parallel);
    if (op.alone) {
      ScoreSumBody<T, I> body{d_score.get(), static_cast<const I*>(op.transpose.perm), typed<A>(op.d_key), from, edges.heads()};
      Walk<I, A, ScoreSumBody<T, I>>(op.transpose, body).run(parallel);
    }
  }
}

#include "gatv2.inl"

template <class T, class I>
void attention(const Attention& op, Parallel parallel) {
  switch (op.score) {
    case Score::additive: return attend<Score::additive, T, I>(op, parallel);
    case Score::gatv2: return attend<Score::gatv2, T, I>(op, parallel);
    case Score::dot: return attend<Score::dot, T, I>(op, parallel);
  }
}

template <class T, class I>
void attention_grad(const AttentionGrad& op, Parallel parallel) {
  switch (op.forward.score) {
    case Score::additive: return attend_grad<Score::additive, T, I>(op, parallel);
    case Score::gatv2: return gatv2_grad<T, I>(op, parallel);
    case Score::dot: return attend_grad<Score::dot, T, I>(op, parallel);
  }
}
