r"""The block-level operators in plain PyTorch: what runs where there is no kernel, and the oracle of every kernel.

The signatures are those of :mod:`pyg_sar.ops`. Sums are :func:`~torch.nn.functional.embedding_bag` and its gradient:
the one sum over gathered rows in PyTorch that gathers no row into memory, on every device and for every floating-point
type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.csr import index_type, rows_of
from pyg_sar.ops.dropout import dropout_factors

ADDITIVE, GATV2, DOT = range(3)


def zero_(out: Tensor) -> None:
    """Fill with zeros."""
    out.zero_()


def huge_pages_(out: Tensor) -> None:
    """Change nothing: a hint to the system."""


def spmm_(
    out: Tensor, ptr: Tensor, col: Tensor, x: Tensor, weight: Tensor | None, perm: Tensor | None, once: bool,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Add :func:`weighted_sum`, with weights ``[num_edges, heads]`` in an order of their own, or write it ``once``."""
    if weight is not None and perm is not None:
        weight = weight[perm]
    total = weighted_sum(ptr, col, x, weight, out.size(1))
    if once:
        out[slice(None) if rows is None else rows.long()] = total.to(out.dtype)
    else:
        add(out, total, rows)


def weighted_sum(ptr: Tensor, col: Tensor, x: Tensor, weight: Tensor | None = None, width: int = 0) -> Tensor:
    """Sum gathered rows, each head with weights of its own, into ``width`` columns (by default those of ``x``).

    Rows and weights take the accumulator's type first: ``embedding_bag`` would round weights to that of the rows, and
    rounded weights are wrong alike wherever they are equal.
    """
    x = x.to(accumulator(x.dtype))
    if col.numel() == 0 or x.numel() == 0:
        return x.new_zeros(ptr.numel() - 1, width or x.size(1))
    if weight is not None and weight.size(1) > 1:
        heads = weight.size(1)
        shared = x.size(1) * heads == width
        each = [x] * heads if shared else x.chunk(heads, 1)
        parts = [weighted_sum(ptr, col, a, w, 0) for a, w in zip(each, weight.split(1, 1), strict=True)]
        return sum(parts[1:], parts[0]) if parts[0].size(1) == width else torch.cat(parts, 1)
    if weight is not None:
        weight = weight.reshape(-1)
    return F.embedding_bag(col, x, ptr, mode="sum", include_last_offset=True, per_sample_weights=weight)


def sddmm_(out: Tensor, ptr: Tensor, col: Tensor, y: Tensor, x: Tensor, rows: Tensor | None = None) -> None:
    """Write the product of the two rows of each edge, head by head."""
    if out.numel() == 0:
        return
    if x.size(1) == 0:
        out.zero_()
        return
    bags, heads = rows_of(ptr, col, rows).to(col.dtype), out.size(1)
    each = [x] * heads if x.size(1) < y.size(1) else x.chunk(heads, 1)
    for h, (a, b) in enumerate(zip(y.chunk(heads, 1), each, strict=True)):
        a, b = (t.to(out.dtype).contiguous() for t in (a, b))  # there is none of half precision on a GPU
        out[:, h] = torch.ops.aten._embedding_bag_per_sample_weights_backward(a, b, col, ptr, bags, 0)


def row_products_(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Write the product of each row of ``x`` and that of ``y``, head by head: of edges from each row to itself."""
    if x.shape != y.shape:
        raise RuntimeError(f"Expected rows of the same shape (got {list(x.shape)} and {list(y.shape)})")
    ids = torch.arange(x.size(0) + 1, dtype=index_type(x.size(0)), device=x.device)
    torch.ops.pyg_sar.sddmm_(out, ids, ids[:-1], x, y)


def extremum_(
    best: Tensor, count: Tensor, ptr: Tensor, col: Tensor, x: Tensor, largest: bool, rows: Tensor | None = None
) -> None:
    """Merge the block: whoever is larger brings its count."""
    row, values = rows_of(ptr, col, rows).long(), x[col].to(best.dtype) * (1 if largest else -1)
    here = segment_max(row, best.size(0), values)
    ties = segment_sum(row, best.size(0), (values == here[row]).to(count.dtype))
    new = torch.maximum(best, here)
    count.copy_(count * (best == new) + ties * (here == new))
    best.copy_(new)


def extremum_grad_(out: Tensor, ptr: Tensor, row: Tensor, x: Tensor, best: Tensor, share: Tensor) -> None:
    """Give each source its share of the extrema that it attains."""
    src = rows_of(ptr, row).long()
    out += segment_sum(src, out.size(0), ((x[src] == best[row]) * share[row]).to(out.dtype))


def scores(
    row: Tensor, col: Tensor, key: Tensor, query: Tensor | None, edge: Tensor | None, att: Tensor | None, kind: int,
    parameter: float, heads: int,
) -> Tensor:  # fmt: skip
    """Return the score of each edge and head in the accumulator's type, see :class:`pyg_sar.reduce.Softmax`."""
    if kind == DOT:
        assert query is not None
        keys = key[col] if edge is None else key[col] + edge
        product = split(query[row] * keys, heads)
        return parameter * product.sum(-1, dtype=accumulator(key.dtype))
    total = key[col]
    for rows in (None if query is None else query[row], edge):
        total = total if rows is None else total + rows
    total = F.leaky_relu(total, parameter)
    if att is None:
        return total.to(accumulator(key.dtype))
    return split(total * att, heads).sum(-1, dtype=accumulator(key.dtype))


def factors(e_id: Tensor | None, heads: int, seed: int, dropout: float, head: int, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of dropout for each edge and head, if there is any."""
    return None if e_id is None else dropout_factors(e_id, heads, dropout, seed, dtype, head)


def attention_(
    peak: Tensor, total: Tensor, out: Tensor, ptr: Tensor, col: Tensor, key: Tensor, value: Tensor,
    query: Tensor | None, edge: Tensor | None, att: Tensor | None, kind: int, parameter: float, e_id: Tensor | None,
    seed: int, dropout: float, head: int, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Merge the block into the running softmax."""
    row, (num_dst, heads) = rows_of(ptr, col, rows).long(), peak.shape
    score = scores(row, col, key, query, edge, att, kind, parameter, heads)
    new = torch.maximum(peak, segment_max(row, num_dst, score))
    anchor = new.masked_fill(new == -torch.inf, 0)  # a destination without edges so far
    weight, decay = (score - anchor[row]).exp_(), (peak - anchor).exp_()
    total.mul_(decay).add_(segment_sum(row, num_dst, weight))
    drop = factors(e_id, heads, seed, dropout, head, weight.dtype)
    weight = weight if drop is None else weight * drop
    split(out, heads).mul_(decay.unsqueeze(-1))
    add(out, weighted_sum(ptr, col, value, weight), rows)
    if edge is not None and kind == DOT:
        out += segment_sum(row, num_dst, spread(weight, edge))
    peak.copy_(new)


def attention_grad_(
    d_value: Tensor, d_key: Tensor | None, d_query: Tensor | None, d_edge: Tensor | None, d_att: Tensor | None,
    ptr: Tensor, col: Tensor, src_ptr: Tensor, dst: Tensor, perm: Tensor, key: Tensor, value: Tensor,
    query: Tensor | None, edge: Tensor | None, att: Tensor | None, peak: Tensor, total: Tensor, inner: Tensor | None,
    grad: Tensor, kind: int, parameter: float, e_id: Tensor | None, seed: int, dropout: float, head: int,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Rebuild the coefficients from the largest score and the normaliser; the gradient of the score itself is left to
    autograd.

    Without ``inner``, the product of output and gradient, the block must hold all edges. Next to a coefficient of 1 all
    others are 0: no gradient passes its score, though rounding may leave a difference of two large products.
    """
    row, heads = rows_of(ptr, col, rows).long(), peak.size(1)
    d_keys = d_value if kind == GATV2 else d_key
    with torch.enable_grad():
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (key, query, edge, att)]
        k, q, e, a = leaves
        score = scores(row, col, k, q, e, a, kind, parameter, heads)
    weight = (score.detach() - peak[row]).exp_()
    alpha = weight / total[row]
    drop = factors(e_id, heads, seed, dropout, head, alpha.dtype)
    product = torch.empty_like(alpha)
    sddmm_(product, ptr, col, grad, value, rows)
    if edge is not None and kind == DOT:
        product += split(grad[row] * edge, heads).sum(-1, dtype=product.dtype)
    product = product if drop is None else product * drop
    inner = segment_sum(row, peak.size(0), weight * product) / total if inner is None else inner
    d_score = alpha.masked_fill(alpha == 1, 0) * (product - inner[row])
    pairs = zip(leaves, (d_keys, d_query, d_edge, d_att), strict=True)
    wanted = [(t, d) for t, d in pairs if t is not None and d is not None]
    found = torch.autograd.grad(score, [t for t, _ in wanted], d_score)
    weight = alpha if drop is None else alpha * drop
    d_value += weighted_sum(src_ptr, dst, grad, weight[perm])
    for (_, into), part in zip(wanted, found, strict=True):
        into += part
    if d_edge is not None and kind == DOT:
        d_edge += spread(weight, grad[row])


def additive_grad_(
    value: Tensor, d_key: Tensor, d_query: Tensor | None, d_edge: Tensor | None, ptr: Tensor, col: Tensor,
    src_ptr: Tensor, dst: Tensor, perm: Tensor, key: Tensor, query: Tensor | None, edge: Tensor | None, peak: Tensor,
    total: Tensor, grad: Tensor, parameter: float, e_id: Tensor | None, seed: int, dropout: float, head: int,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient of values over them."""
    d_value = torch.zeros_like(value, dtype=accumulator(value.dtype))
    attention_grad_(
        d_value, d_key, d_query, d_edge, None, ptr, col, src_ptr, dst, perm, key, value, query, edge, None, peak, total,
        None, grad, ADDITIVE, parameter, e_id, seed, dropout, head, rows,
    )  # fmt: skip
    value.copy_(d_value)


def spread(weight: Tensor, rows: Tensor) -> Tensor:
    """Multiply each head of rows by its weight."""
    return (split(rows, weight.size(1)) * weight.unsqueeze(-1)).flatten(1).to(weight.dtype)


def split(rows: Tensor, heads: int) -> Tensor:
    """Return a view of rows ``[n, heads * channels]`` as ``[n, heads, channels]``."""
    return rows.view(rows.size(0), heads, rows.size(1) // heads)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which rows of ``dtype`` are summed: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def add(out: Tensor, total: Tensor, rows: Tensor | None) -> None:
    """Add to all rows, or to some."""
    if rows is None:
        out += total
    else:
        out.index_add_(0, rows, total.to(out.dtype))


def segment_sum(row: Tensor, num_rows: int, values: Tensor) -> Tensor:
    """Sum the values of the edges of each destination."""
    index = row.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return values.new_zeros(num_rows, *values.shape[1:]).scatter_add_(0, index, values)


def segment_max(row: Tensor, num_rows: int, values: Tensor) -> Tensor:
    """Return the largest value among the edges of each destination; minus infinity if there is none."""
    index = row.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    lowest = values.new_full((num_rows, *values.shape[1:]), -torch.inf)
    return lowest.scatter_reduce_(0, index, values, "amax")


def moments_(mean: Tensor, m2: Tensor, x: Tensor) -> None:
    """Write means and sums of squared deviations of columns."""
    n = max(x.size(0), 1)
    guess = x.sum(0, dtype=accumulator(x.dtype)) / n
    total, squares = torch.zeros_like(mean), torch.zeros_like(m2)
    for rows in pieces(x):
        deviation = rows - guess
        total += deviation.sum(0)
        squares += deviation.square_().sum(0)
    shift = total / n  # what the guess lacks
    mean.copy_(guess + shift)
    m2.copy_(squares - shift * total)


def column_products_(sums: Tensor, products: Tensor, x: Tensor, grad: Tensor, center: Tensor) -> None:
    """Add the sums of columns, piece by piece."""
    for rows, g in zip(pieces(x), pieces(grad), strict=True):
        sums += g.sum(0, dtype=center.dtype)
        products += (g * (rows - center)).sum(0)


def column_affine_(
    out: Tensor, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, grad: Tensor | None, factor: Tensor | None
) -> None:
    """Scale and shift, piece by piece; on a GPU the pieces are large, as it takes time to be told of each."""
    for rows, g, into in zip(pieces(x), pieces(x if grad is None else grad), pieces(out), strict=True):
        value = torch.addcmul(shift, rows - center, scale)
        into.copy_(value if factor is None else value.addcmul_(g, factor))


def dropout_rows_(out: Tensor, x: Tensor, id: Tensor, seed: int, p: float) -> None:
    """Drop numbers of rows, piece by piece: the random words take eight bytes each."""
    for rows, ids, into in zip(pieces(x), id.split(len(pieces(x)[0])), pieces(out), strict=True):
        torch.mul(rows, dropout_factors(ids, x.size(1), p, seed, x.dtype), out=into)


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Return rows in pieces that stay in a cache while several operations pass over them; a GPU has more of it."""
    return x.split(max((2**17 if x.is_cpu else 2**24) // max(x.size(1), 1), 1))
