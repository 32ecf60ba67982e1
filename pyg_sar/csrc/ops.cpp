// The operators of pyg_sar/ops/ on CPU tensors: checks, and the choice of a kernel. Built on torch's stable ABI, so
// that one library serves every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"

namespace pyg_sar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

std::string shape(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d > 0 ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

int64_t width_of(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.dim() == 2, "Expected '", name, "' to be a matrix (got ", shape(t), ")");
  return t.size(1);
}

Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::Double: return Type::f64;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Half: return Type::f16;
    default: STD_TORCH_CHECK(false, "Expected rows of a floating-point type (got ", torch::headeronly::toString(x.scalar_type()), ")");
  }
}

ScalarType accumulator(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The best kernels that the processor runs; PYG_SAR_ISA chooses worse ones. Heads of so few columns that they do not fill
// a vector (64 fill any) take those whose vectors they fill, if there are any.
const Kernels& kernels(const Tensor& x, bool wide = false, int64_t columns = 64) {
#if defined(__x86_64__)
  static const int level = [] {
    const char* wish = std::getenv("PYG_SAR_ISA");
    const std::string isa = wish == nullptr ? "avx512" : wish;
    STD_TORCH_CHECK(isa == "avx512" || isa == "avx2" || isa == "plain", "PYG_SAR_ISA must be plain, avx2 or avx512 (got ", isa, ")");
    __builtin_cpu_init();
    if (isa == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return 2;
    return isa != "plain" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
  }();
  const int64_t bytes = columns * (accumulator(x) == ScalarType::Double ? 8 : 4);
  const int filled = bytes >= 64 || bytes < 16 ? level : std::min(level, bytes >= 32 ? 1 : 0);
  if (filled == 2) return avx512::kernels(type_of(x), wide);
  if (filled == 1) return avx2::kernels(type_of(x), wide);
#endif
  return plain::kernels(type_of(x), wide);
}
const Kernels& kernels(const Tensor& x, const Tensor& ptr, int64_t columns = 64) {
  return kernels(x, ptr.scalar_type() == ScalarType::Long, columns);
}

// Threads take units one by one, as their costs differ.
void parallel(int64_t units, void (*task)(int64_t, void*), void* context) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), units);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t u = next++; u < units; u = next++) task(u, context);
  });
}

// Makes tensors contiguous where the kernels need it, and keeps what it made.
class Arguments {
 public:
  Rows<const void> rows(const char* name, const Tensor& t, int64_t count, int64_t width, ScalarType type) {
    STD_TORCH_CHECK(t.is_cpu(), "Expected '", name, "' on the CPU");
    STD_TORCH_CHECK(t.scalar_type() == type, "Expected '", name, "' of type ", torch::headeronly::toString(type), " (got ",
                    torch::headeronly::toString(t.scalar_type()), ")");
    STD_TORCH_CHECK(t.dim() == 2 && (count < 0 || t.size(0) == count) && t.size(1) == width, "Expected '", name,
                    "' of shape [", count < 0 ? std::string("*") : std::to_string(count), ", ", width, "] (got ", shape(t), ")");
    if (width <= 1 || t.stride(1) == 1) return {t.const_data_ptr(), t.stride(0)};
    kept_.push_back(torch::stable::contiguous(t));
    return {kept_.back().const_data_ptr(), width};
  }
  Rows<const void> rows(const char* name, const Maybe& t, int64_t count, int64_t width, ScalarType type) {
    return t ? rows(name, *t, count, width, type) : Rows<const void>{};
  }
  // What is written to.
  Rows<void> out(const char* name, const Tensor& t, int64_t count, int64_t width, ScalarType type) {
    STD_TORCH_CHECK(t.dim() != 2 || width <= 1 || t.stride(1) == 1, "Expected the rows of '", name, "' to be contiguous");
    const Rows<const void> r = rows(name, t, count, width, type);
    STD_TORCH_CHECK(t.size(0) <= 1 || t.stride(0) >= width, "Expected rows of '", name, "' that do not overlap");
    return {const_cast<void*>(r.data), r.stride};
  }
  Rows<void> out(const char* name, const Maybe& t, int64_t count, int64_t width, ScalarType type) {
    return t ? out(name, *t, count, width, type) : Rows<void>{};
  }

  // An index with `count` numbers (or any, if negative).
  const void* index(const char* name, const Tensor& t, int64_t count, ScalarType type) {
    STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == type && t.dim() == 1 && (count < 0 || t.size(0) == count), "Expected '",
                    name, "' to be a CPU tensor of ", count, " numbers of type ", torch::headeronly::toString(type), " (got ",
                    torch::headeronly::toString(t.scalar_type()), " ", shape(t), ")");
    if (t.is_contiguous()) return t.const_data_ptr();
    kept_.push_back(torch::stable::contiguous(t));
    return kept_.back().const_data_ptr();
  }

  // `numbers`: of the rows among those of `like`, if these are not all.
  Csr csr(const Tensor& ptr, const Tensor& col, const Maybe& perm, const Maybe& numbers = {}, const Tensor* like = nullptr) {
    const ScalarType type = ptr.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, "Expected indices of type int32 or int64 (got ",
                    torch::headeronly::toString(type), ")");
    const int64_t edges = col.numel();
    Csr csr{ptr.numel() - 1, edges, index("ptr", ptr, -1, type), index("col", col, edges, type),
            perm ? index("perm", *perm, edges, type) : nullptr,
            numbers ? index("rows", *numbers, ptr.numel() - 1, type) : nullptr, numbers ? like->size(0) : ptr.numel() - 1};
    STD_TORCH_CHECK(csr.rows >= 0, "Expected 'ptr' to hold at least one number");
    const auto at = [&](const void* index, int64_t k) {
      return type == ScalarType::Int ? static_cast<const int32_t*>(index)[k] : static_cast<const int64_t*>(index)[k];
    };
    STD_TORCH_CHECK(at(csr.ptr, 0) == 0 && at(csr.ptr, csr.rows) == edges, "Expected 'ptr' to lead from 0 to the number of edges, ",
                    edges, " (got ", at(csr.ptr, 0), " to ", at(csr.ptr, csr.rows), ")");
    if (csr.number != nullptr && csr.rows > 0)
      STD_TORCH_CHECK(at(csr.number, 0) >= 0 && at(csr.number, csr.rows - 1) < csr.all, "Expected 'rows' from 0 to ", csr.all - 1,
                      " (got ", at(csr.number, 0), " to ", at(csr.number, csr.rows - 1), ")");
    return csr;
  }

 private:
  std::vector<Tensor> kept_;
};

// Fresh memory comes in pages of 4 KiB, and to touch each of them for the first time costs more than to write it: large
// tensors ask for huge pages.
void ask_for_huge_pages(const Tensor& t) {
#if defined(__linux__)
  constexpr uintptr_t huge = 2 << 20;
  const uintptr_t first = uintptr_t(t.const_data_ptr()), bytes = t.is_contiguous() ? t.numel() * t.element_size() : 0;
  const uintptr_t begin = (first + huge - 1) / huge * huge, end = (first + bytes) / huge * huge;
  // A hint that may be refused; it is lost on parts of huge pages.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

void zero_(Tensor out) {
  STD_TORCH_CHECK(out.is_cpu() && out.is_contiguous(), "Expected a contiguous tensor on the CPU");
  struct Range {
    char* begin;
    int64_t bytes;
  } range{static_cast<char*>(out.mutable_data_ptr()), int64_t(out.numel() * out.element_size())};
  ask_for_huge_pages(out);
  static constexpr int64_t unit = 1 << 20;
  parallel((range.bytes + unit - 1) / unit, [](int64_t u, void* context) {
    const Range& r = *static_cast<Range*>(context);
    std::memset(r.begin + u * unit, 0, std::min(unit, r.bytes - u * unit));
  }, &range);
}

void huge_pages_(Tensor out) { ask_for_huge_pages(out); }

// Columns of a head, when `heads` heads lie side by side in `wide` columns.
int64_t channels_of(int64_t wide, int64_t heads) {
  STD_TORCH_CHECK(heads > 0 ? wide % heads == 0 : wide == 0, "Expected rows of ", heads, " equal heads (got ", wide, " columns)");
  return heads == 0 ? 0 : wide / heads;
}

void spmm_(Tensor out, Tensor ptr, Tensor col, Tensor x, Maybe weight, Maybe perm, bool once, Maybe rows) {
  Arguments args;
  const int64_t of_x = width_of("x", x), of_out = width_of("out", out);
  Sum op{};
  op.heads = weight ? width_of("weight", *weight) : 1, op.channels = channels_of(std::max(of_x, of_out), op.heads);
  op.same_x = of_x < of_out, op.same_out = of_out < of_x, op.num_cols = x.size(0);
  op.csr = args.csr(ptr, col, perm, rows, &out);
  const int64_t wide = op.heads * op.channels;
  op.x = args.rows("x", x, -1, op.same_x ? op.channels : wide, x.scalar_type());
  op.weight = args.rows("weight", weight, op.csr.edges, op.heads, accumulator(x));
  op.once = once;
  op.out = args.out("out", out, op.csr.all, op.same_out ? op.channels : wide, once ? x.scalar_type() : accumulator(x));
  if (once) ask_for_huge_pages(out);
  if ((op.csr.edges > 0 || once) && wide > 0) kernels(x, ptr).sum(op, parallel);
}

void sddmm_(Tensor out, Tensor ptr, Tensor col, Tensor y, Tensor x, Maybe rows) {
  Arguments args;
  Product op{};
  const int64_t of_x = width_of("x", x), of_y = width_of("y", y);
  op.heads = width_of("out", out), op.channels = channels_of(of_y, op.heads), op.same_x = of_x < of_y;
  op.csr = args.csr(ptr, col, std::nullopt, rows, &y);
  op.y = args.rows("y", y, op.csr.all, of_y, x.scalar_type());
  op.x = args.rows("x", x, -1, op.same_x ? op.channels : of_y, x.scalar_type());
  op.out = args.out("out", out, op.csr.edges, op.heads, accumulator(x));
  if (op.csr.edges > 0) kernels(x, ptr).product(op, parallel);
}

void extremum_(Tensor best, Tensor count, Tensor ptr, Tensor col, Tensor x, bool largest, Maybe rows) {
  Arguments args;
  Extremum op{};
  op.csr = args.csr(ptr, col, std::nullopt, rows, &best);
  op.width = width_of("x", x), op.largest = largest;
  op.x = args.rows("x", x, -1, op.width, x.scalar_type());
  op.best = args.out("best", best, op.csr.all, op.width, accumulator(x));
  op.count = args.out("count", count, op.csr.all, op.width, accumulator(x));
  if (op.csr.edges > 0) kernels(x, ptr).extremum(op, parallel);
}

void extremum_grad_(Tensor out, Tensor ptr, Tensor row, Tensor x, Tensor best, Tensor share) {
  Arguments args;
  ExtremumGrad op{};
  op.csr = args.csr(ptr, row, std::nullopt);
  op.width = width_of("x", x);
  op.x = args.rows("x", x, op.csr.rows, op.width, x.scalar_type());
  op.best = args.rows("best", best, -1, op.width, x.scalar_type());
  op.share = args.rows("share", share, best.size(0), op.width, x.scalar_type());
  op.out = args.out("out", out, op.csr.rows, op.width, accumulator(x));
  if (op.csr.edges > 0) kernels(x, ptr).extremum_grad(op, parallel);
}

Attention attention(Arguments& args, const Tensor& ptr, const Tensor& col, const Tensor& key, const Tensor& value,
                    const Maybe& query, const Maybe& edge, const Maybe& att, const Tensor& peak, int64_t score, double parameter,
                    const Maybe& e_id, int64_t seed, double dropout, int64_t head, const Maybe& rows) {
  const int64_t heads = width_of("peak", peak);
  STD_TORCH_CHECK(0 <= score && score <= 2, "Unknown score ", score);
  STD_TORCH_CHECK(heads > 0 && width_of("value", value) % heads == 0, "Expected values of ", heads, " equal heads (got ", shape(value), ")");
  Attention op{};
  op.score = Score(score), op.parameter = parameter;
  op.csr = args.csr(ptr, col, std::nullopt, rows, &peak);
  op.num_src = value.size(0), op.heads = heads, op.channels = value.size(1) / heads;
  const auto type = value.scalar_type();
  const int64_t width = op.score == Score::additive ? heads : value.size(1);
  STD_TORCH_CHECK(query || op.score == Score::additive, "This score needs 'query'");
  STD_TORCH_CHECK(att.has_value() == (op.score == Score::gatv2), "'att' is for GATv2");
  op.key = args.rows("key", key, op.num_src, width, type);
  op.value = args.rows("value", value, op.num_src, value.size(1), type);
  op.query = args.rows("query", query, op.csr.all, width, type);
  op.edge = args.rows("edge", edge, op.csr.edges, width, type);
  op.att = att ? args.index("att", *att, value.size(1), accumulator(value)) : nullptr;
  op.e_id = e_id ? static_cast<const int64_t*>(args.index("e_id", *e_id, op.csr.edges, ScalarType::Long)) : nullptr;
  op.seed = seed, op.dropout = dropout, op.head = head;
  return op;
}

void attention_(Tensor peak, Tensor total, Tensor out, Tensor ptr, Tensor col, Tensor key, Tensor value, Maybe query,
                Maybe edge, Maybe att, int64_t score, double parameter, Maybe e_id, int64_t seed, double dropout,
                int64_t head, Maybe rows) {
  Arguments args;
  const auto type = accumulator(value);
  Attention op = attention(args, ptr, col, key, value, query, edge, att, peak, score, parameter, e_id, seed, dropout, head, rows);
  op.peak = args.out("peak", peak, op.csr.all, op.heads, type);
  op.total = args.out("total", total, op.csr.all, op.heads, type);
  op.out = args.out("out", out, op.csr.all, value.size(1), type);
  if (op.csr.edges > 0) kernels(value, ptr, op.channels).attention(op, parallel);
}

Csr transpose(Arguments& args, const Attention& op, const Tensor& ptr, const Tensor& src_ptr, const Tensor& dst, const Tensor& perm) {
  const Csr csr = args.csr(src_ptr, dst, perm);
  STD_TORCH_CHECK(csr.rows == op.num_src && csr.edges == op.csr.edges && src_ptr.scalar_type() == ptr.scalar_type(),
                  "Expected the transpose of the same block");
  return csr;
}

void attention_grad_(Tensor d_value, Maybe d_key, Maybe d_query, Maybe d_edge, Maybe d_att, Tensor ptr, Tensor col,
                     Tensor src_ptr, Tensor dst, Tensor perm, Tensor key, Tensor value, Maybe query, Maybe edge, Maybe att,
                     Tensor peak, Tensor total, Tensor inner, Tensor grad, int64_t score, double parameter, Maybe e_id,
                     int64_t seed, double dropout, int64_t head, Maybe rows) {
  Arguments args;
  const auto type = accumulator(value);
  AttentionGrad op{};
  op.forward = attention(args, ptr, col, key, value, query, edge, att, peak, score, parameter, e_id, seed, dropout, head, rows);
  STD_TORCH_CHECK(d_key.has_value() == (op.forward.score != Score::gatv2), "'d_key' is for keys that are not the values");
  const int64_t dsts = op.forward.csr.all, heads = op.forward.heads, all = value.size(1);
  const int64_t width = op.forward.score == Score::additive ? heads : all;
  op.transpose = transpose(args, op.forward, ptr, src_ptr, dst, perm);
  op.peak = args.rows("peak", peak, dsts, heads, type);
  op.total = args.rows("total", total, dsts, heads, type);
  op.inner = args.rows("inner", inner, dsts, heads, type);
  op.grad = args.rows("grad", grad, dsts, all, value.scalar_type());
  op.d_value = args.out("d_value", d_value, op.forward.num_src, all, type);
  op.d_key = args.out("d_key", d_key, op.forward.num_src, width, type);
  op.d_query = args.out("d_query", d_query, dsts, width, type);
  op.d_edge = args.out("d_edge", d_edge, op.forward.csr.edges, width, type);
  op.d_att = d_att ? const_cast<void*>(args.index("d_att", *d_att, all, type)) : nullptr;
  STD_TORCH_CHECK(!d_att || d_att->is_contiguous(), "Expected 'd_att' to be contiguous");
  if (op.forward.csr.edges > 0) kernels(value, ptr, op.forward.channels).attention_grad(op, parallel);
}

void additive_grad_(Tensor value, Tensor d_key, Maybe d_query, Maybe d_edge, Tensor ptr, Tensor col, Tensor src_ptr, Tensor dst,
                    Tensor perm, Tensor key, Maybe query, Maybe edge, Tensor peak, Tensor total, Tensor grad,
                    double parameter, Maybe e_id, int64_t seed, double dropout, int64_t head, Maybe rows) {
  Arguments args;
  const auto type = accumulator(value);
  AttentionGrad op{};
  op.forward = attention(args, ptr, col, key, value, query, edge, std::nullopt, peak, int64_t(Score::additive), parameter,
                         e_id, seed, dropout, head, rows);
  const int64_t dsts = op.forward.csr.all, heads = op.forward.heads, all = value.size(1);
  op.transpose = transpose(args, op.forward, ptr, src_ptr, dst, perm);
  op.peak = args.rows("peak", peak, dsts, heads, type);
  op.total = args.rows("total", total, dsts, heads, type);
  op.grad = args.rows("grad", grad, dsts, all, value.scalar_type());
  op.d_value = args.out("value", value, op.forward.num_src, all, value.scalar_type());
  op.d_key = args.out("d_key", d_key, op.forward.num_src, heads, type);
  op.d_query = args.out("d_query", d_query, dsts, heads, type);
  op.d_edge = args.out("d_edge", d_edge, op.forward.csr.edges, heads, type);
  op.alone = true;
  kernels(value, ptr, op.forward.channels).attention_grad(op, parallel);
}

// A vector with a number for each column.
const void* of_columns(Arguments& args, const char* name, const Tensor& t, int64_t width, ScalarType type) {
  STD_TORCH_CHECK(t.is_contiguous(), "Expected '", name, "' to be contiguous");
  return args.index(name, t, width, type);
}
double* sums_of_columns(Arguments& args, const char* name, const Tensor& t, int64_t width) {
  return static_cast<double*>(const_cast<void*>(of_columns(args, name, t, width, ScalarType::Double)));
}

void moments_(Tensor mean, Tensor m2, Tensor x) {
  Arguments args;
  Moments op{};
  op.rows = x.size(0), op.width = width_of("x", x);
  op.x = args.rows("x", x, -1, op.width, x.scalar_type());
  op.mean = sums_of_columns(args, "mean", mean, op.width);
  op.m2 = sums_of_columns(args, "m2", m2, op.width);
  kernels(x).moments(op, parallel);
}

void column_products_(Tensor sums, Tensor products, Tensor x, Tensor grad, Tensor center) {
  Arguments args;
  ColumnProducts op{};
  op.rows = x.size(0), op.width = width_of("x", x);
  op.x = args.rows("x", x, -1, op.width, x.scalar_type());
  op.grad = args.rows("grad", grad, op.rows, op.width, x.scalar_type());
  op.center = of_columns(args, "center", center, op.width, accumulator(x));
  op.sums = sums_of_columns(args, "sums", sums, op.width);
  op.products = sums_of_columns(args, "products", products, op.width);
  kernels(x).column_products(op, parallel);
}

void column_affine_(Tensor out, Tensor x, Tensor center, Tensor scale, Tensor shift, Maybe grad, Maybe factor) {
  Arguments args;
  ColumnAffine op{};
  const auto type = accumulator(x);
  op.rows = x.size(0), op.width = width_of("x", x);
  STD_TORCH_CHECK(grad.has_value() == factor.has_value(), "'grad' and 'factor' come together");
  op.x = args.rows("x", x, -1, op.width, x.scalar_type());
  op.grad = args.rows("grad", grad, op.rows, op.width, x.scalar_type());
  op.center = of_columns(args, "center", center, op.width, type);
  op.scale = of_columns(args, "scale", scale, op.width, type);
  op.shift = of_columns(args, "shift", shift, op.width, type);
  op.factor = factor ? of_columns(args, "factor", *factor, op.width, type) : nullptr;
  op.out = args.out("out", out, op.rows, op.width, x.scalar_type());
  ask_for_huge_pages(out);
  kernels(x).column_affine(op, parallel);
}

void dropout_rows_(Tensor out, Tensor x, Tensor id, int64_t seed, double p) {
  Arguments args;
  DropoutRows op{};
  op.rows = x.size(0), op.width = width_of("x", x), op.seed = seed, op.p = p;
  STD_TORCH_CHECK(0 <= p && p <= 1, "Expected 'p' from 0 to 1 (got ", p, ")");
  op.x = args.rows("x", x, -1, op.width, x.scalar_type());
  op.id = static_cast<const int64_t*>(args.index("id", id, op.rows, ScalarType::Long));
  op.out = args.out("out", out, op.rows, op.width, x.scalar_type());
  ask_for_huge_pages(out);
  if (op.rows > 0) kernels(x).dropout_rows(op, parallel);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("zero_", TORCH_BOX(&zero_));
  m.impl("huge_pages_", TORCH_BOX(&huge_pages_));
  m.impl("spmm_", TORCH_BOX(&spmm_));
  m.impl("sddmm_", TORCH_BOX(&sddmm_));
  m.impl("extremum_", TORCH_BOX(&extremum_));
  m.impl("extremum_grad_", TORCH_BOX(&extremum_grad_));
  m.impl("attention_", TORCH_BOX(&attention_));
  m.impl("attention_grad_", TORCH_BOX(&attention_grad_));
  m.impl("additive_grad_", TORCH_BOX(&additive_grad_));
  m.impl("moments_", TORCH_BOX(&moments_));
  m.impl("column_products_", TORCH_BOX(&column_products_));
  m.impl("column_affine_", TORCH_BOX(&column_affine_));
  m.impl("dropout_rows_", TORCH_BOX(&dropout_rows_));
}

}  // namespace pyg_sar
