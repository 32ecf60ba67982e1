// Runs every kernel, for every type and instruction set, on random matrices, and compares it with loops in double
// precision. It has no torch in it, so that `make sanitize` can build it with sanitizers, and its arrays end where their
// last row does.
#include "../../pyg_sar/csrc/includes.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

namespace {

using namespace pyg_sar;

std::mt19937_64 random_bits(0);
int64_t below(int64_t n) { return int64_t(random_bits() % uint64_t(n)); }

std::string title;
void expect(bool truth, const std::string& what) {
  if (truth) return;
  std::fprintf(stderr, "%s: %s\n", title.c_str(), what.c_str());
  std::exit(1);
}

// Small multiples of 1/8, which all types represent.
float small() { return float(below(41) - 20) / 8; }

uint16_t half(float x, bool brain) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (brain) return uint16_t(u >> 16);
  const uint32_t sign = u >> 16 & 0x8000;
  return uint16_t(x == 0 ? sign : sign | ((u >> 23 & 0xff) - 112) << 10 | (u >> 13 & 0x3ff));
}

double number(double x, bool) { return x; }
double number(uint16_t bits, bool brain) {
  const int exponent = brain ? bits >> 7 & 0xff : bits >> 10 & 0x1f, digits = brain ? 7 : 10, bias = brain ? 127 : 15;
  const int fraction = bits & ((1 << digits) - 1);
  double out = std::ldexp(fraction + (exponent > 0 ? 1 << digits : 0), std::max(exponent, 1) - bias - digits);
  if (exponent == (brain ? 0xff : 0x1f)) out = fraction == 0 ? INFINITY : NAN;
  return bits >> 15 ? -out : out;
}

// A matrix in the type of the rows, and in double; its rows may lie apart, and it has no byte more than it needs.
template <class E>
struct Matrix {
  int64_t rows, width, stride;
  bool brain;
  std::unique_ptr<E[]> data;
  std::vector<double> exact;

  Matrix(int64_t rows, int64_t width, bool random, bool brain = false)
      : rows(rows), width(width), stride(width + below(2) * 3), brain(brain),
        data(new E[rows == 0 ? 0 : (rows - 1) * stride + width]), exact(rows * width) {
    for (int64_t k = 0; k < (rows == 0 ? 0 : (rows - 1) * stride + width); ++k) data[k] = E(77);  // what lies between
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < width; ++j) {
        const float x = random ? small() : 0;
        exact[i * width + j] = x;
        if constexpr (std::is_same_v<E, uint16_t>) data[i * stride + j] = half(x, brain);
        else data[i * stride + j] = E(x);
      }
  }
  double operator()(int64_t i, int64_t j) const { return exact[i * width + j]; }
  double& operator()(int64_t i, int64_t j) { return exact[i * width + j]; }
  operator Rows<const void>() const { return {data.get(), stride}; }
  operator Rows<void>() { return {data.get(), stride}; }

  // Compares what a kernel wrote with `exact`.
  void check(const char* name, double tolerance) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < width; ++j) {
        const double found = number(data[i * stride + j], brain), truth = (*this)(i, j);
        if (found == truth) continue;
        expect(std::abs(found - truth) <= tolerance * (1 + std::abs(truth)), std::string(name) + "[" + std::to_string(i) + ", " +
               std::to_string(j) + "] is " + std::to_string(found) + " instead of " + std::to_string(truth));
      }
    for (int64_t i = 0; i + 1 < rows; ++i)
      for (int64_t j = width; j < stride; ++j) expect(data[i * stride + j] == E(77), std::string(name) + ": wrote between rows");
  }
};

// With doubly compressed rows it stores none that are empty.
template <class I>
struct Graph {
  int64_t dsts, srcs, edges = 0, rows = 0;
  std::unique_ptr<I[]> ptr, number, col, row, src_ptr, dst, perm;

  Graph(const std::vector<int64_t>& degrees, int64_t srcs, bool compressed)
      : dsts(int64_t(degrees.size())), srcs(srcs), number(compressed ? new I[degrees.size()] : nullptr) {
    for (const int64_t d : degrees) edges += d;
    ptr.reset(new I[dsts + 1]), src_ptr.reset(new I[srcs + 1]());
    for (auto* p : {&col, &row, &dst, &perm}) p->reset(new I[edges]);
    ptr[0] = 0;
    for (int64_t i = 0; i < dsts; ++i) {
      if (compressed && degrees[i] == 0) continue;
      if (compressed) number[rows] = I(i);
      const int64_t begin = ptr[rows], end = begin + degrees[i];
      ptr[++rows] = I(end);
      for (int64_t e = begin; e < end; ++e) row[e] = I(i), col[e] = I(below(3) == 0 ? 0 : below(srcs));
    }
    int64_t t = 0;
    for (int64_t j = 0; j < srcs; ++j) {
      for (int64_t e = 0; e < edges; ++e)
        if (int64_t(col[e]) == j) dst[t] = row[e], perm[t++] = I(e);
      src_ptr[j + 1] = I(t);
    }
  }
  Csr forward() const { return {rows, edges, ptr.get(), col.get(), nullptr, number.get(), dsts}; }
  Csr transpose() const { return {srcs, edges, src_ptr.get(), dst.get(), perm.get(), nullptr, srcs}; }
};

// Two threads, or one that takes the units in an order that no thread guarantees.
void threads(int64_t units, void (*task)(int64_t, void*), void* context) {
  std::atomic<int64_t> next{0};
  const auto work = [&] { for (int64_t u = next++; u < units; u = next++) task(u, context); };
  std::thread other(work);
  work();
  other.join();
}
void backwards(int64_t units, void (*task)(int64_t, void*), void* context) {
  for (int64_t u = units - 1; u >= 0; --u) task(u, context);
}

uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}
double factor(int64_t id, int64_t head, int64_t seed, double p) {
  const auto key = [&](int64_t k) { return mix(mix(mix(uint32_t(k + 1)) ^ uint32_t(seed)) ^ uint32_t(uint64_t(seed) >> 32)); };
  const uint32_t h = mix(mix(uint32_t(id)) ^ uint32_t(uint64_t(id) >> 32) ^ key(0));
  return double(mix(h ^ key(head + 1))) >= p * 0x1p32 ? 1 / (1 - p) : 0;
}

// E: how elements are stored, A: the accumulator.
template <class E, class A, class I>
struct Checks {
  const Kernels& kernels;
  bool brain;
  Parallel parallel;
  const Graph<I>& g;
  int64_t H, C;
  double tolerance = std::is_same_v<A, double> ? 1e-12 : 2e-4;

  Matrix<E> rows(int64_t n, int64_t width) const { return Matrix<E>(n, width, true, brain); }
  Matrix<A> numbers(int64_t n, int64_t width, bool random = true) const { return Matrix<A>(n, width, random); }

  void sum() const {
    for (const bool weighted : {false, true})
      for (const bool reverse : {false, true}) {
        const int64_t H = weighted ? this->H : 1;
        Matrix<E> x = rows(reverse ? g.dsts : g.srcs, H * C);
        Matrix<A> weight = numbers(g.edges, H), out = numbers(reverse ? g.srcs : g.dsts, H * C);
        Sum op{reverse ? g.transpose() : g.forward(), x, weighted ? weight : Rows<const void>{}, out, x.rows, H, C, false, false, false};
        kernels.sum(op, parallel);
        for (int64_t e = 0; e < g.edges; ++e)
          for (int64_t j = 0; j < H * C; ++j)
            out(reverse ? g.col[e] : g.row[e], j) += (weighted ? weight(e, j / C) : 1) * x(reverse ? g.row[e] : g.col[e], j);
        out.check("sum", tolerance);
        Matrix<E> sums(out.rows, H * C, reverse || !g.number, brain);  // rows that are not stored are not written
        std::fill(sums.exact.begin(), sums.exact.end(), 0);
        op.out = sums, op.once = true;
        kernels.sum(op, parallel);
        if constexpr (std::is_same_v<E, uint16_t>) continue;
        for (int64_t e = 0; e < g.edges; ++e)
          for (int64_t j = 0; j < H * C; ++j)
            sums(reverse ? g.col[e] : g.row[e], j) += (weighted ? weight(e, j / C) : 1) * x(reverse ? g.row[e] : g.col[e], j);
        sums.check("sum once", tolerance);
      }
  }

  // Heads that share the columns of one operand.
  void shared() const {
    Matrix<E> one = rows(g.srcs, C), all = rows(g.dsts, H * C);
    Matrix<A> weight = numbers(g.edges, H), wide = numbers(g.dsts, H * C), narrow = numbers(g.srcs, C), each = numbers(g.edges, H);
    kernels.sum({g.forward(), one, weight, wide, g.srcs, H, C, H > 1, false, false}, parallel);
    kernels.sum({g.transpose(), all, weight, narrow, g.dsts, H, C, false, H > 1, false}, parallel);
    kernels.product({g.forward(), all, one, each, H, C, H > 1}, parallel);
    for (int64_t e = 0; e < g.edges; ++e)
      for (int64_t h = 0; h < H; ++h) {
        each(e, h) = 0;
        for (int64_t c = 0; c < C; ++c) {
          wide(g.row[e], h * C + c) += weight(e, h) * one(g.col[e], c);
          narrow(g.col[e], c) += weight(e, h) * all(g.row[e], h * C + c);
          each(e, h) += all(g.row[e], h * C + c) * one(g.col[e], c);
        }
      }
    wide.check("sum of shared columns", tolerance), narrow.check("sum into shared columns", tolerance);
    each.check("product with shared columns", tolerance);
  }

  void product() const {
    Matrix<E> y = rows(g.dsts, H * C), x = rows(g.srcs, H * C);
    Matrix<A> out = numbers(g.edges, H);
    kernels.product({g.forward(), y, x, out, H, C, false}, parallel);
    for (int64_t e = 0; e < g.edges; ++e)
      for (int64_t h = 0; h < H; ++h) {
        out(e, h) = 0;
        for (int64_t j = h * C; j < (h + 1) * C; ++j) out(e, h) += y(g.row[e], j) * x(g.col[e], j);
      }
    out.check("product", tolerance);
  }

  void extrema() const {
    for (const bool largest : {true, false}) {
      const int64_t width = H * C;
      Matrix<E> x = rows(g.srcs, width), share = rows(g.dsts, width), best = rows(g.dsts, width);
      Matrix<A> most = numbers(g.dsts, width), count = numbers(g.dsts, width, false), grad = numbers(g.srcs, width);
      kernels.extremum({g.forward(), x, most, count, width, largest}, parallel);
      kernels.extremum_grad({g.transpose(), x, best, share, grad, width}, parallel);
      for (int64_t e = 0; e < g.edges; ++e)
        for (int64_t j = 0; j < width; ++j) {
          const int64_t i = g.row[e], s = g.col[e];
          const double value = largest ? x(s, j) : -x(s, j);
          count(i, j) = value > most(i, j) ? 1 : count(i, j) + (value == most(i, j));
          most(i, j) = std::max(most(i, j), value);
          grad(s, j) += x(s, j) == best(i, j) ? share(i, j) : 0;
        }
      most.check("best", 0), count.check("count", 0), grad.check("gradient of the extremum", tolerance);
    }
  }

  void attention(Score score, bool with_query, bool with_edge, bool with_dropout) const {
    const int64_t all = H * C, width = score == Score::additive ? H : all;
    const double p = with_dropout ? 0.4 : 0, parameter = score == Score::dot ? 0.125 : 0.25;
    const int64_t seed = 0x123456789abcdef, first = with_query ? 3 : 0;
    Matrix<E> value = rows(g.srcs, all), other = rows(g.srcs, width), query = rows(g.dsts, width), edge = rows(g.edges, width);
    Matrix<E>& key = score == Score::gatv2 ? value : other;
    Matrix<E> grad = rows(g.dsts, all);
    Matrix<A> att(1, all, true), inner = numbers(g.dsts, H);
    std::unique_ptr<int64_t[]> ids(new int64_t[g.edges]);
    for (int64_t e = 0; e < g.edges; ++e) ids[e] = int64_t(random_bits());
    const auto keys = [&](int64_t e, int64_t j) { return key(g.col[e], j) + (with_edge ? edge(e, j) : 0); };
    const auto sum = [&](int64_t e, int64_t j) { return keys(e, j) + (with_query ? query(g.row[e], j) : 0); };
    const auto slope = [&](double t) { return t > 0 ? 1 : parameter; };
    const auto drop = [&](int64_t e, int64_t h) { return with_dropout ? factor(ids[e], first + h, seed, p) : 1; };
    const auto values = [&](int64_t e, int64_t j) { return value(g.col[e], j) + (score == Score::dot && with_edge ? edge(e, j) : 0); };

    Matrix<A> peak = numbers(g.dsts, H, false), total = numbers(g.dsts, H, false), out = numbers(g.dsts, all, false);
    for (int64_t i = 0; i < g.dsts; ++i)
      for (int64_t h = 0; h < H; ++h) peak.data[i * peak.stride + h] = -std::numeric_limits<A>::infinity(), peak(i, h) = -INFINITY;
    Attention op{score, parameter, g.srcs, H, C, g.forward(), key, value, with_query ? query : Rows<const void>{},
                 with_edge ? edge : Rows<const void>{}, score == Score::gatv2 ? att.data.get() : nullptr,
                 with_dropout ? ids.get() : nullptr, seed, p, first, peak, total, out};
    std::vector<double> s(g.edges * H);
    for (int64_t e = 0; e < g.edges; ++e)
      for (int64_t h = 0; h < H; ++h) {
        double& t = s[e * H + h];
        if (score == Score::additive) t = sum(e, h) * slope(sum(e, h));
        for (int64_t j = h * C; score == Score::gatv2 && j < (h + 1) * C; ++j) t += att(0, j) * sum(e, j) * slope(sum(e, j));
        for (int64_t j = h * C; score == Score::dot && j < (h + 1) * C; ++j) t += parameter * query(g.row[e], j) * keys(e, j);
        peak(g.row[e], h) = std::max(peak(g.row[e], h), t);
      }
    for (int64_t e = 0; e < g.edges; ++e)
      for (int64_t h = 0; h < H; ++h) {
        const double w = std::exp(s[e * H + h] - peak(g.row[e], h));
        total(g.row[e], h) += w;
        for (int64_t j = h * C; j < (h + 1) * C; ++j) out(g.row[e], j) += w * drop(e, h) * values(e, j);
      }
    kernels.attention(op, parallel);
    peak.check("peak", tolerance), total.check("total", tolerance), out.check("out", tolerance);
    // The same block once more: everything doubles.
    kernels.attention(op, parallel);
    for (double& t : total.exact) t *= 2;
    for (double& o : out.exact) o *= 2;
    peak.check("second peak", tolerance), total.check("second total", tolerance), out.check("second out", tolerance);

    for (const bool everything : {true, false}) {
      Matrix<A> d_value = numbers(g.srcs, all), d_other = numbers(g.srcs, width), d_query = numbers(g.dsts, width);
      Matrix<A> d_edge = numbers(g.edges, width), d_att(1, all, true);
      Matrix<A>& d_key = score == Score::gatv2 ? d_value : d_other;
      for (int64_t e = 0; e < g.edges; ++e)
        for (int64_t h = 0; h < H; ++h) {
          const int64_t i = g.row[e], j = g.col[e];
          const double alpha = std::exp(s[e * H + h] - peak(i, h)) / total(i, h), w = alpha * drop(e, h);
          double inside = 0;
          for (int64_t c = h * C; c < (h + 1) * C; ++c) {
            inside += grad(i, c) * values(e, c);
            d_value(j, c) += w * grad(i, c);
          }
          const double ds = alpha * (drop(e, h) * inside - inner(i, h));
          if (score == Score::additive) {
            const double d = ds * slope(sum(e, h));
            d_key(j, h) += d, d_query(i, h) += d, d_edge(e, h) += d;
            continue;
          }
          for (int64_t c = h * C; c < (h + 1) * C; ++c) {
            if (score == Score::gatv2) {
              const double d = ds * att(0, c) * slope(sum(e, c));
              d_key(j, c) += d, d_query(i, c) += d, d_edge(e, c) += d;
              d_att(0, c) += ds * sum(e, c) * slope(sum(e, c));
            } else {
              d_key(j, c) += ds * parameter * query(i, c), d_query(i, c) += ds * parameter * keys(e, c);
              d_edge(e, c) += ds * parameter * query(i, c) + w * grad(i, c);
            }
          }
        }
      const bool wants_query = everything && with_query, wants_edge = everything && with_edge;
      const bool wants_att = everything && score == Score::gatv2;
      AttentionGrad back{op, g.transpose(), peak, total, inner, grad, score == Score::gatv2 ? Rows<void>{} : Rows<void>(d_other), d_value,
                         wants_query ? Rows<void>(d_query) : Rows<void>{}, wants_edge ? Rows<void>(d_edge) : Rows<void>{},
                         wants_att ? d_att.data.get() : nullptr, false};
      kernels.attention_grad(back, parallel);
      const double loose = 20 * tolerance;
      d_value.check("d value", loose);
      if (score != Score::gatv2) d_other.check("d key", loose);
      if (wants_query) d_query.check("d query", loose);
      if (wants_edge) d_edge.check("d edge", loose);
      if (wants_att) d_att.check("d att", loose);
    }
    if (score == Score::additive) alone(op, peak, total, grad, value, s, sum, drop);
  }

  // Additive scores without `inner`; the values become their gradient.
  template <class F, class D>
  void alone(const Attention& op, const Matrix<A>& peak, const Matrix<A>& total, const Matrix<E>& grad, Matrix<E>& value,
             const std::vector<double>& s, F sum, D drop) const {
    Matrix<A> d_key = numbers(g.srcs, H), d_query = numbers(g.dsts, H), d_edge = numbers(g.edges, H), inner = numbers(g.dsts, H, false);
    std::vector<double> d_value(value.exact.size()), alpha(g.edges * H), inside(g.edges * H);
    for (int64_t e = 0; e < g.edges; ++e)
      for (int64_t h = 0; h < H; ++h) {
        const int64_t i = g.row[e], j = g.col[e], k = e * H + h;
        alpha[k] = std::exp(s[k] - peak(i, h)) / total(i, h);
        for (int64_t c = h * C; c < (h + 1) * C; ++c) {
          inside[k] += drop(e, h) * grad(i, c) * value(j, c);
          d_value[j * H * C + c] += alpha[k] * drop(e, h) * grad(i, c);
        }
        inner(i, h) += alpha[k] * inside[k];
      }
    for (int64_t e = 0; e < g.edges; ++e)
      for (int64_t h = 0; h < H; ++h) {
        const int64_t i = g.row[e], j = g.col[e], k = e * H + h;
        const double ds = alpha[k] * (inside[k] - inner(i, h)) * (sum(e, h) > 0 ? 1 : op.parameter);
        d_key(j, h) += ds, d_query(i, h) += ds, d_edge(e, h) += ds;
      }
    kernels.attention_grad({op, g.transpose(), peak, total, {}, grad, d_key, value, op.query ? Rows<void>(d_query) : Rows<void>{},
                            op.edge ? Rows<void>(d_edge) : Rows<void>{}, nullptr, true}, parallel);
    const double loose = 20 * tolerance;
    value.exact = d_value;
    if constexpr (!std::is_same_v<E, uint16_t>) value.check("value", loose);
    d_key.check("d key alone", loose);
    if (op.query) d_query.check("d query alone", loose);
    if (op.edge) d_edge.check("d edge alone", loose);
  }

  void all() const {
    sum(), shared(), product(), extrema();
    for (const bool edge : {false, true})
      for (const bool dropout : {false, true}) {
        attention(Score::additive, false, edge, dropout);
        for (const Score score : {Score::additive, Score::gatv2, Score::dot}) attention(score, true, edge, dropout);
      }
  }
};

// Moments of columns, products with a gradient, and rows that are scaled and shifted.
template <class T, class A>
void columns(const Kernels& kernels, bool brain, Parallel parallel, int64_t rows, int64_t width) {
  const double loose = sizeof(A) == 8 ? 1e-12 : 1e-4;
  const Matrix<T> x(rows, width, true, brain), grad(rows, width, true, brain);
  const Matrix<A> center(1, width, true), scale(1, width, true), shift(1, width, true), factor(1, width, true);
  Matrix<double> mean(1, width, false), m2(1, width, false), sums(1, width, false), products(1, width, false);
  kernels.moments({x, mean.data.get(), m2.data.get(), rows, width}, parallel);
  kernels.column_products({x, grad, center.data.get(), sums.data.get(), products.data.get(), rows, width}, parallel);
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      mean(0, j) += x(i, j) / double(rows);
      sums(0, j) += grad(i, j), products(0, j) += grad(i, j) * (x(i, j) - center(0, j));
    }
    for (int64_t i = 0; i < rows; ++i) m2(0, j) += (x(i, j) - mean(0, j)) * (x(i, j) - mean(0, j));
  }
  mean.check("mean", loose), m2.check("m2", loose), sums.check("sums", loose), products.check("products", loose);
  for (const bool backward : {false, true}) {
    Matrix<T> out(rows, width, false, brain);
    kernels.column_affine({x, backward ? Rows<const void>(grad) : Rows<const void>{}, center.data.get(), scale.data.get(),
                           shift.data.get(), backward ? factor.data.get() : nullptr, out, rows, width}, parallel);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < width; ++j) {
        out(i, j) = (x(i, j) - center(0, j)) * scale(0, j) + shift(0, j) + (backward ? grad(i, j) * factor(0, j) : 0);
      }
    out.check(backward ? "affine with gradient" : "affine", sizeof(T) == 2 ? 1e-2 : loose);
  }
}

// Dropout of rows: what is dropped is for the tests against plain PyTorch; here, that each number is dropped or scaled.
template <class T>
void dropout(const Kernels& kernels, bool brain, Parallel parallel, int64_t rows, int64_t width) {
  const Matrix<T> x(rows, width, true, brain);
  std::vector<int64_t> id(rows);
  for (int64_t& i : id) i = int64_t(random_bits());
  for (const double p : {0.0, 0.5, 1.0}) {
    Matrix<T> out(rows, width, false, brain);
    kernels.dropout_rows({x, id.data(), int64_t(random_bits()), p, out, rows, width}, parallel);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < width; ++j) {
        const bool zero = number(out.data[i * out.stride + j], brain) == 0;
        out(i, j) = p == 1 || (p > 0 && zero) ? 0 : x(i, j) / (1 - p);
      }
    out.check("dropout of rows", 0);
  }
}

// Every number that has 16 bits, through a sum of one edge, which is rounded to itself.
void every_half(const Kernels& kernels, bool brain) {
  constexpr int64_t n = 1 << 16;
  std::vector<uint16_t> x(n);
  std::vector<float> out(n);
  for (int64_t k = 0; k < n; ++k) x[k] = uint16_t(k);
  const int32_t ptr[]{0, 1}, col[]{0};
  kernels.sum({{1, 1, ptr, col, nullptr, nullptr, 1}, {x.data(), n}, {}, {out.data(), n}, 1, 1, n, false, false, false}, backwards);
  std::vector<uint16_t> same(n);
  kernels.sum({{1, 1, ptr, col, nullptr, nullptr, 1}, {x.data(), n}, {}, {same.data(), n}, 1, 1, n, false, false, true}, backwards);
  for (int64_t k = 0; k < n; ++k) {
    const double truth = number(x[k], brain);
    expect(truth == double(out[k]) || (truth != truth && out[k] != out[k]), "bits " + std::to_string(k) + " are read as " +
           std::to_string(out[k]));
    if (truth == truth && truth != 0) expect(same[k] == k, "bits " + std::to_string(k) + " become " + std::to_string(same[k]));
  }
}

template <class I>
void run(const char* isa, const Kernels& (*choose)(Type, bool)) {
  constexpr bool wide = sizeof(I) == 8;
  struct Problem { std::vector<int64_t> degrees; int64_t srcs; };
  const std::vector<Problem> problems{
      {{}, 3}, {{0}, 1}, {{1}, 1}, {{3, 0, 0, 7, 1, 5, 33, 2, 0}, 6}, {{0, 1024, 2, 1025, 0, 1023, 9}, 40}, {{2, 3100, 31, 0}, 25},
  };
  const std::vector<std::pair<int64_t, int64_t>> shapes{{1, 1}, {3, 5}, {2, 17}, {17, 2}};
  for (size_t p = 0; p < 2 * problems.size(); ++p) {
    const Problem& problem = problems[p / 2];
    const Graph<I> g(problem.degrees, problem.srcs, p % 2 == 1);
    if (p % 2 == 1 && (g.rows == g.dsts || g.edges > 1000)) continue;
    const size_t shape_count = g.edges > 1000 ? 2 : shapes.size();  // the rest would take long with sanitizers
    for (size_t k = 0; k < shape_count; ++k) {
      const auto [H, C] = shapes[(k + 1) % shapes.size()];
      for (const Parallel parallel : {Parallel(threads), Parallel(backwards)}) {
        const auto name = [&](const char* type) {
          title = std::string(isa) + (wide ? " int64 " : " int32 ") + type + " with " + std::to_string(g.edges) + " edges, " +
                  std::to_string(H) + " heads of " + std::to_string(C);
        };
        name("f32"), Checks<float, float, I>{choose(Type::f32, wide), false, parallel, g, H, C}.all();
        name("f64"), Checks<double, double, I>{choose(Type::f64, wide), false, parallel, g, H, C}.all();
        name("bf16"), Checks<uint16_t, float, I>{choose(Type::bf16, wide), true, parallel, g, H, C}.all();
        name("f16"), Checks<uint16_t, float, I>{choose(Type::f16, wide), false, parallel, g, H, C}.all();
      }
    }
  }
  for (const auto& [rows, width] : std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {1, 1}, {33, 257}, {2049, 17}, {4100, 560}}) {
    if (wide) break;  // they have no index
    for (const Parallel parallel : {Parallel(threads), Parallel(backwards)}) {
      title = std::string(isa) + " " + std::to_string(rows) + " rows of " + std::to_string(width);
      columns<float, float>(choose(Type::f32, wide), false, parallel, rows, width);
      columns<double, double>(choose(Type::f64, wide), false, parallel, rows, width);
      columns<uint16_t, float>(choose(Type::bf16, wide), true, parallel, rows, width);
      columns<uint16_t, float>(choose(Type::f16, wide), false, parallel, rows, width);
      dropout<float>(choose(Type::f32, wide), false, parallel, rows, width);
      dropout<double>(choose(Type::f64, wide), false, parallel, rows, width);
      dropout<uint16_t>(choose(Type::bf16, wide), true, parallel, rows, width);
    }
  }
  title = isa;
  if (!wide) every_half(choose(Type::bf16, wide), true), every_half(choose(Type::f16, wide), false);
  std::printf("%s with %s: ok\n", isa, wide ? "int64" : "int32");
  std::fflush(stdout);
}

}  // namespace

int main() {
  run<int32_t>("plain", plain::kernels);
  run<int64_t>("plain", plain::kernels);
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) run<int32_t>("avx2", avx2::kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    run<int32_t>("avx512", avx512::kernels);
#endif
}
