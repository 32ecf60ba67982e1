r"""What functions of torch make of tensors of a kind: :func:`kind_of` answers for one call of a function, and raises
:class:`~pyg_sar.watch.kinds.LocalUse` for what is wrong.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Container, Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.structure import tensors
from pyg_sar.watch import LOSS, ROWS, SAME
from pyg_sar.watch.counts import Count
from pyg_sar.watch.kinds import ENDS, IDS, SHARE, Call, Kind, LocalUse

BEFORE = "Do it before 'pyg_sar.partition', with the whole graph at hand"
SUM_UP = "Take the sum of all workers first: 'pyg_sar.global_sum(...)', or 'pyg_sar.all_reduce(...)' without a gradient"
MEAN = (
    "Take 'pyg_sar.global_mean(...)' of the rows, or 'pyg_sar.global_sum(x.sum(0)) / data.total_nodes'; of hits, "
    "'pyg_sar.accuracy(...)'"
)
TABLE = "Take 'pyg_sar.nn.NodeEmbedding(data, channels)' for a row for each node"
REDUCTION = "Pass reduction='none' and take 'pyg_sar.global_mean(...)' of the result"
ROW_SUMS = "Pass reduction='none' and take 'pyg_sar.global_mean(...)' of the sum of each row ('.flatten(1).sum(1)')"
NORM = "Take the normalisation of this name in 'pyg_sar.nn', or 'pyg_sar.nn.convert(model)'"
WIDTH = "A width must be one that all workers know: take 'data.num_classes', or write it down"
DEGREES = f"{WIDTH}; how many nodes have each degree tells 'pyg_sar.degree_histogram(data.edge_index)'"
LINKS = (
    "'index, mine = pyg_sar.shard_links(edge_label_index, data.n_id)' gives this worker's pairs, by whose numbers rows "
    "are read, 'z[index[0]]' those of all workers"
)
REPLICATED = (
    "Wrap it in 'pyg_sar.replicated(...)': what does not depend on nodes, or does so through a sum of all alone, as "
    "'pyg_sar.replicated(pyg_sar.global_sum(losses.sum()))', also of squares of a table of nodes"
)

DRAWS = (
    "draws among the numbers of this worker's nodes alone. Ids of all nodes are below 'data.total_nodes'; draw them "
    "alike on all workers, for 'pyg_sar.shard_links'"
)
NUMBERED = "numbers of destinations, which are others on each worker"
GLOBAL = "Their numbers in the whole graph are 'data.n_id[edge_index[1]]'"
FEATURES = (
    "gives nodes features by where they stand among those of this worker: one of each worker gets the same. Make them "
    "before 'partition', or take 'pyg_sar.nn.NodeEmbedding(data, channels)'"
)

OVER = "over nodes or edges, of which this worker holds a share: the others would get other results"
COUNTED = "is the same on all workers (of parameters alone, or a sum of all): its gradient would count for each"
SUMMED = "of a sum over this worker's rows as if it were one over all of them"


def names(text: str) -> set[str]:
    """Return the words of a text, names of functions."""
    return set(text.split())


# Where functions have the dimensions that they reduce, or put in order, and which these are if they are not given.
DIMENSIONS: dict[tuple[int, int | None], str] = {
    (1, None): "sum nansum count_nonzero any all mean nanmean var std var_mean std_mean max min amax amin aminmax "
    "argmax argmin median nanmedian prod logsumexp cumsum cumprod cummax cummin logcumsumexp unique unique_consecutive",
    (1, -1): "mode sort argsort msort softmax log_softmax softmin",
    (2, None): "norm vector_norm linalg_vector_norm linalg_norm quantile nanquantile",
    (2, -1): "kthvalue topk diff fft_fft fft_ifft fft_rfft fft_irfft",
    (2, 1): "normalize cosine_similarity",
    (4, -1): "gumbel_softmax",
}
REDUCTIONS = {name: place for place, text in DIMENSIONS.items() for name in text.split()}
SUMS, ASKS, ORDERS = names("sum nansum count_nonzero"), names("any all"), names("sort argsort")
WIDTHS = names("max amax unique")
NORMS = {"batch_norm": (1,), "instance_norm": (0, 1), "group_norm": (0,)}  # dimensions that are kept apart
LAYER_NORMS = names("layer_norm rms_norm")
ADDS = names("add sub cat stack hstack vstack where lerp addcmul addcdiv")
DIVIDES = {"div": 1, "rdiv": 0, "reciprocal": 0}  # where the divisor stands
ARITHMETIC = {*ADDS, *DIVIDES, *names("mul pow rpow maximum minimum")}
PAIRED = names("cosine_similarity pairwise_distance mse_loss l1_loss smooth_l1_loss huber_loss")
FACTORS = {(0, 1): "matmul mm bmm mv dot vdot inner linear outer", (1, 0): "rmatmul", (1, 2): "addmm addmv baddbmm"}
PRODUCTS = {name: places for places, text in FACTORS.items() for name in text.split()}
PRODUCTS_PLUS = names("linear addmm addmv baddbmm")  # and what is added
CURVED = names(
    "sqrt rsqrt log log2 log10 log1p exp expm1 square pow rpow reciprocal sigmoid logsigmoid tanh relu leaky_relu elu "
    "gelu silu softplus softmax log_softmax logsumexp norm linalg_norm linalg_vector_norm normalize cosine_similarity "
    "std var layer_norm abs prod cumprod floor ceil round trunc remainder fmod floor_divide sin cos tan atan atan2 erf "
    "mse_loss l1_loss smooth_l1_loss huber_loss"
)
COMPARED = names(  # of counts, PyG's layers take the largest for a size
    "max min amax amin aminmax maximum minimum clamp clip clamp_min clamp_max median sort topk"
)
CLIPS = ("norm", "clip", "clamp")  # parts of the names of what must not see a share of a gradient
COMPARES = names("eq ne lt le gt ge isnan isfinite isinf isclose any all argmax argmin sign bool")
CONSTANTS = names("zeros ones full empty arange linspace eye tensor scalar_tensor")
LIKE = names("zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor")
PERMUTES = names("transpose swapaxes swapdims t T mT H mH adjoint permute movedim moveaxis unsqueeze squeeze")
CUTS = names(
    "chunk split split_with_sizes tensor_split narrow flip roll repeat_interleave expand expand_as broadcast_to repeat "
    "tile cat"
)
VIEWS = names("view reshape flatten unflatten view_as reshape_as ravel")
COPIES = names("clone contiguous detach to long int cpu cuda data deepcopy")
TO_FLOAT = names("to float double half bfloat16 type type_as")
STACKS = names("cat stack hstack vstack")
LIKENED = names("type_as to expand_as view_as reshape_as")  # a tensor to another one, whose numbers do not matter
SCATTERS = names("scatter_add index_add scatter scatter_reduce index_reduce index_copy index_fill")
SAME_IDS = {*COPIES, *CUTS, *VIEWS, *PERMUTES, *names("getitem index_select select unbind")}


def kind_of(call: Call, out: Tensor) -> Kind | None:
    """Return what a result of a call is, if anything is known of it."""
    if any(isinstance(t, ShardedEdgeIndex) for t, _ in call.kinds):
        return of_edges(call, out)
    joined = call.name in STACKS and call.whats == {IDS}
    if joined or (call.name in SAME_IDS and call.kind(call.arg(0, "input")) == Kind(IDS)):
        return Kind(IDS)
    if call.whats & {ROWS, ENDS}:
        return of_rows(call, out)
    if call.whats & {SHARE, LOSS} and call.name not in LIKE:
        return of_share(call) if SHARE in call.whats else of_loss(call)
    known = all(k is not None for _, k in call.kinds)
    return Kind(SAME) if known and (call.kinds or call.name in CONSTANTS) and call.name != "grad" else None


def refuse_ids(call: Call, known: Container[Tensor]) -> None:
    """Refuse to choose rows by ids, which may be ``known`` ones: it would be rows of other nodes, or there are none of
    these numbers.
    """
    key = key_of_rows(call)
    if isinstance(key, Tensor) and (key in known or call.kind(key) == Kind(IDS)):
        raise LocalUse("chooses rows of this worker by numbers of nodes in the whole graph", LINKS)


def key_of_rows(call: Call) -> Any:
    """Return by what a call chooses rows, if it does."""
    if call.name == "embedding":
        return call.arg(0, "input") if call.rows(call.arg(1, "weight")) == 0 else None
    t = call.arg(0, "input")
    row = call.rows(t)
    if row is None or call.name not in ("getitem", "setitem", "index_select", "gather"):
        return None
    if call.name in ("index_select", "gather"):
        return call.arg(2, "index") if call.arg(1, "dim") % t.dim() == row else None
    return next((key for key, dims in spelt_out(call.args[1], t.dim()) if row in dims), None)


def of_edges(call: Call, out: Tensor) -> Kind | None:
    """What comes of a sharded ``edge_index``: numbers of destinations, rows that were read or added up by sources."""
    if call.name.startswith("new_") or out.dim() == 0:
        return None
    if isinstance(call.args[0], ShardedEdgeIndex):
        return Kind(ENDS) if call.name in ("getitem", "select", "unbind") else Kind(ROWS, out.dim() - 1)
    dim = call.arg(1, "dim")
    return Kind(ROWS, dim % out.dim() if isinstance(dim, int) else 0)


def of_rows(call: Call, out: Tensor) -> Kind | None:
    """What comes of rows."""
    name = call.name
    if SHARE in call.whats and name in LIKENED and call.rows(call.args[0]) is None:
        return of_share(call)
    read = [k for t, k in call.kinds if k is not None and t is not call.kwargs.get("out")]
    if name not in ONTO_SHARES and any(k.what == SHARE for k in read):
        raise LocalUse(f"'{name}' makes use {SUMMED}", SUM_UP)
    refuse_table(call)
    refuse_pairs(call)
    refuse_numbers(call, out)
    of_two = name in ("max", "min") and isinstance(call.arg(1, "other"), Tensor)
    if name in REDUCTIONS and call.rows(call.arg(0, "input")) is not None and not of_two:
        return reduced(call, out)
    if name in RULE:
        return RULE[name](call, out)
    if default_reduction(call.func) is not None:
        return loss(call, out)
    if name.startswith("linalg_"):
        return matrix(call, out)
    if name.startswith("new_"):
        return Kind(SAME)
    return aligned(call, out)


def refuse_table(call: Call) -> None:
    """Refuse a parameter of as many rows that is joined to rows: they would belong to others on another worker."""
    if call.name == "getitem" and isinstance(call.args[0], torch.nn.Parameter) and call.rows(call.args[0]) is None:
        key = call.args[1]
        if isinstance(key, Tensor) and key.dtype == torch.bool and call.rows(key) is not None:
            raise LocalUse("chooses rows of a parameter by a mask of this worker's nodes or edges", TABLE)
    if call.name not in ARITHMETIC or call.end_to_end():
        return
    t, kind = call.first()
    behind = t.dim() - kind.dim  # counted from the right, as shapes are broadcast
    for p in (p for p, k in call.kinds if isinstance(p, torch.nn.Parameter) and k == Kind(SAME)):
        if p.dim() >= behind and p.size(-behind) == t.size(kind.dim) > 1:
            why = (
                f"joins ('{call.name}') a parameter of shape {list(p.shape)} to the rows of as many nodes or edges of "
                f"this worker, which are others on each worker, while all have the same parameters"
            )
            raise LocalUse(why, TABLE)


def refuse_pairs(call: Call) -> None:
    """Refuse to join each row to each other one, by dimensions of their own."""
    if call.name in (ARITHMETIC | PAIRED) - STACKS:
        behind = {t.dim() - k.dim for t, k in call.kinds if k is not None and k.what == ROWS and t.size(k.dim) > 1}
        if len(behind) > 1:
            raise LocalUse(f"combines every row with every other one ('{call.name}') {OVER}", BEFORE)


def refuse_numbers(call: Call, out: Tensor) -> None:
    """Refuse to compute with the numbers of destinations."""
    if ENDS in call.whats and out.is_floating_point() and call.name in (ARITHMETIC | TO_FLOAT) - STACKS:
        raise LocalUse(f"computes ('{call.name}') with the {NUMBERED}", GLOBAL)


def aligned(call: Call, out: Tensor) -> Kind | None:
    """Rows are counted by the same dimension, from the left or, where shapes are broadcast, from the right."""
    t, kind = call.first()
    what = ENDS if kind.what == ENDS and call.name in COPIES else ROWS
    if call.name in ("where", "masked_fill") and ENDS in call.whats:
        what = ENDS  # of which some are sent elsewhere
    for dim in (kind.dim, out.dim() - t.dim() + kind.dim):
        if 0 <= dim < out.dim() and out.size(dim) == t.size(kind.dim):
            return Kind(what, dim)
    return None


def reduced(call: Call, out: Tensor) -> Kind | None:
    """Reductions over other dimensions leave rows; those over rows see a share of the graph."""
    name, t, (place, default) = call.name, call.arg(0, "input"), REDUCTIONS[call.name]
    (what, row, _), dims = call.kind(t), call.arg(place, "dim")  # type: ignore[misc]
    dims = default if dims is None or isinstance(dims, (bool, float, torch.dtype)) else dims
    dims = [dims] if isinstance(dims, int) else dims or range(t.dim())
    over = {d % t.dim() for d in dims}
    if row not in over:
        several = call.name.endswith("quantile") and isinstance(call.arg(1, "q"), Tensor) and call.arg(1, "q").dim()
        return Kind(ROWS, several + row - sum(d < row for d in over) * (out.dim() - several < t.dim()))
    if name in SUMS:
        return Kind(SHARE, size=t.size(row))
    if name in ORDERS and not t.is_floating_point():  # to group rows by them
        return Kind(ROWS, row)
    if name in ASKS or (what == ENDS and name in ("max", "amax")):  # which tells how many sums to make
        return None
    advice = MEAN if "mean" in name else WIDTH if name in WIDTHS and not t.is_floating_point() else BEFORE
    raise LocalUse(f"takes '{name}' {OVER}", advice)


@functools.cache
def default_reduction(func: Callable) -> Any:
    """Return how a function reduces unless its argument ``reduction`` says, as losses do; None if it has none."""
    try:
        return inspect.signature(func).parameters["reduction"].default
    except (KeyError, TypeError, ValueError):
        return None


def loss(call: Call, out: Tensor) -> Kind | None:
    """Losses of rows are rows, or a sum; their mean is that of a worker."""
    reduction = call.kwargs.get("reduction", default_reduction(call.func))
    if reduction == "none" or call.kwargs.get("reduce") is False:
        return aligned(call, out)
    t, kind = call.first()
    if reduction == "sum" or call.kwargs.get("size_average") is False:
        return Kind(SHARE, size=t.size(kind.dim))
    advice = ROW_SUMS if reduction == "batchmean" else REDUCTION
    raise LocalUse(f"takes '{call.name}' with reduction='{reduction}' {OVER}", advice)


def normalised(call: Call, out: Tensor) -> Kind | None:
    """Normalisations by the statistics of a batch."""
    name, t = call.name, call.args[0]
    if name in LAYER_NORMS:
        apart: Iterable[int] = range(t.dim() - len(call.arg(1, "normalized_shape")))
    elif name == "group_norm" or call.arg(5, "training", call.kwargs.get("use_input_stats", name != "batch_norm")):
        apart = NORMS[name]
    else:  # by statistics that are known
        apart = range(t.dim())
    if call.rows(t) not in (None, *apart):
        raise LocalUse(f"takes the statistics of '{name}' {OVER}", NORM)
    return aligned(call, out)


def matrix(call: Call, out: Tensor) -> Kind | None:
    """Matrices with rows in them are those of a share; batches of matrices are not."""
    t, kind = call.first()
    return whole(call, out) if kind.dim >= t.dim() - 2 else aligned(call, out)


def permuted(call: Call, out: Tensor) -> Kind | None:
    """Dimensions in another order: a tiny tensor shows where those of size 2 end up."""
    t, kind = call.first()
    tiny = torch.empty([2 if d == kind.dim else n if n < 2 else 3 for d, n in enumerate(t.shape)])
    shape = list(call.func(tiny, *call.args[1:], **{k: v for k, v in call.kwargs.items() if k != "input"}).shape)
    return kind._replace(dim=shape.index(2)) if 2 in shape and len(shape) == out.dim() else None


def kept(call: Call, out: Tensor) -> Kind | None:
    """Rows that are cut, joined or repeated; new dimensions come first."""
    t, kind = call.first()
    if call.rows(call.args[0]) is not None:
        t, kind = call.args[0], call.kind(call.args[0])  # type: ignore[assignment]
    ends = kind.what == ENDS and (call.name != "cat" or all(k is not None and k.what == ENDS for _, k in call.kinds))
    return Kind(ENDS if ends else ROWS, max(out.dim() - t.dim() + kind.dim, 0))


def viewed(call: Call, out: Tensor) -> Kind | None:
    """The same numbers in another shape: as many stand before the rows."""
    t, kind = call.first()
    before = math.prod(t.shape[: kind.dim])
    dims = [d for d in range(out.dim()) if math.prod(out.shape[:d]) == before]
    same = [d for d in dims if out.size(d) == t.size(kind.dim)]
    return kind._replace(dim=(same or dims)[0]) if same or dims else None


def stacked(call: Call, out: Tensor) -> Kind | None:
    """A new dimension."""
    _, kind = call.first()
    return Kind(ROWS, kind.dim + (call.arg(1, "dim", 0) % out.dim() <= kind.dim))


def taken(call: Call, out: Tensor) -> Kind | None:
    """One entry of a dimension."""
    t, kind = call.first()
    dim = call.arg(1, "dim", 0) % t.dim()
    return None if dim == kind.dim else kind._replace(dim=kind.dim - (dim < kind.dim))


def flat(call: Call, out: Tensor) -> Kind | None:
    """Some rows, one after the other."""
    return aligned(call, out) if call.name == "where" and len(call.kinds) > 1 else Kind(ROWS)


def read(call: Call, out: Tensor) -> Kind | None:
    """Rows chosen by an index, or what an index of rows chooses of other things."""
    t, dim = call.arg(0, "input"), call.arg(1, "dim")
    row = call.rows(t)
    if call.name == "gather":
        return aligned(call, out) if row is None or row != dim % t.dim() else None
    return Kind(ROWS, dim % t.dim()) if row is None else call.kind(t)


def chosen(call: Call, out: Tensor) -> Kind | None:
    """``t[keys]``: follow each key from the left."""
    t, end, first = call.args[0], 0, None
    kind, row = call.kind(t), call.rows(t)
    what = ROWS if row is None or kind is None else kind.what
    for key, dims in spelt_out(call.args[1], t.dim()):  # at dimension `end` of the result
        if isinstance(key, (Tensor, list)):  # all of these put their dimensions where the first one stands
            ids = isinstance(key, Tensor) and key.dtype != torch.bool
            count, found = key.dim() if isinstance(key, Tensor) and ids else 1, call.rows(key)
            first = end if first is None else first
            if row in dims or found is not None:
                return Kind(what, first + (found or 0) * ids) if count else None
            end = max(end, first + count)
        elif row in dims:
            return None if isinstance(key, numbers.Integral) else Kind(what, end)
        else:
            end += isinstance(key, bool) or not isinstance(key, numbers.Integral)
    return None


def by_position(call: Call, sizes: Container[int]) -> bool:
    """Whether some rows, of as many as there are nodes or edges, are chosen by where they stand, or by what is the same
    on all workers.
    """
    if call.name not in ("getitem", "setitem", "index_select", "flip", "roll"):
        return False
    t = call.arg(0, "input")
    row = call.rows(t)
    if row is None or (n := t.size(row)) not in sizes:  # some of them, or several joined
        return False
    if call.name in ("flip", "roll"):
        dims = call.arg(2, "dims") if call.name == "roll" else call.kwargs.get("dims", call.args[1:])
        dims = [dims] if isinstance(dims, int) else dims or range(t.dim())
        return row in {d % t.dim() for it in dims for d in (it if isinstance(it, (tuple, list)) else [it])}
    key = key_of_rows(call)
    if isinstance(key, Tensor):
        return call.kind(key) == Kind(SAME) and (key.dtype == torch.bool or key.numel() != n)
    if isinstance(key, slice):
        return key.indices(n) != (0, n, 1)
    return key is not None and (not hasattr(key, "__len__") or len(key) != n)


def by_groups(call: Call, out: Tensor, sizes: Container[int]) -> bool:
    """Whether rows, of as many as there are nodes or edges, are grouped by where they stand."""
    row = call.rows(call.arg(0, "input")) if call.name in VIEWS else None
    if row is None or (n := call.args[0].size(row)) not in sizes:
        return False
    before = math.prod(call.args[0].shape[:row])
    counts = [out.size(d) for d in range(out.dim()) if math.prod(out.shape[:d]) == before]
    return bool(counts) and n > counts[-1] > 1 and n not in counts


def spelt_out(keys: Any, dims: int) -> Iterable[tuple[Any, range]]:
    """Return keys for all dimensions of a tensor, and the dimensions that each stands for."""
    keys = list(keys) if isinstance(keys, tuple) else [keys]
    rest = [slice(None)] * (dims - sum(map(uses, keys)))
    place = next((k for k, key in enumerate(keys) if key is Ellipsis), len(keys))
    keys[place : place + 1] = rest
    spans = pairwise(accumulate(map(uses, keys), initial=0))
    return zip(keys, (range(*span) for span in spans), strict=True)


def uses(key: Any) -> int:
    """Return how many dimensions of a tensor a key stands for."""
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    return key.dim() if isinstance(key, Tensor) and key.dtype == torch.bool else 1


def assigned(call: Call, sizes: Container[int]) -> Kind | None:
    """``t[key] = value`` of a tensor of which nothing was known: rows that are chosen by rows, or filled with them, if
    there are as many as this worker has nodes or edges; a tensor for all nodes holds a share of them.
    """
    t, key, value = call.args
    kind, index, given = call.kind(t), call.kind(key), call.kind(value)
    if given is not None and given.what == SHARE:
        if kind is not None and kind.what in (ROWS, ENDS):
            raise LocalUse(f"'setitem' makes use {SUMMED}", SUM_UP)
        return Kind(SHARE)
    if kind is not None and kind.what == SHARE:  # perhaps by the sum of all, one number after the other
        return None
    if kind is not None and kind.what != SAME:
        return kind
    by_rows = index is not None and (index.what == ENDS or (index.what == ROWS and key.dtype == torch.bool))
    if by_rows or call.rows(value) is not None:
        return Kind(ROWS) if t.size(0) in sizes else None
    return kind if all(call.kind(it) == Kind(SAME) for it in tensors(key, value)) else None


def scattered(call: Call, out: Tensor) -> Kind | None:
    """Rows that are added up by their destinations are rows again; others are added up over all rows with a number."""
    target, dim, index = call.args[0], call.arg(1, "dim", 0) % max(out.dim(), 1), call.arg(2, "index")
    kind = call.kind(index)
    if call.rows(target) is not None:
        return call.kind(target)
    if kind is None:
        return None
    if kind.what == ENDS:
        return Kind(ROWS, dim)
    if index.dim() > 1 and kind.what == ROWS and kind.dim != dim:
        return Kind(ROWS, kind.dim)
    if call.name in ("scatter_add", "index_add") or call.arg(4, "reduce") == "sum":
        return Kind(SHARE)
    if call.name in ("scatter_reduce", "index_reduce"):
        raise LocalUse(f"takes '{call.name}' of groups {OVER}", BEFORE)
    return Kind(ROWS, dim) if call.rows(call.arg(3, "source")) is not None else None


def counted(call: Call, out: Tensor) -> Kind | None:
    """How many rows have each number, and rows that tell which one."""
    t, width = call.arg(0, "input"), (1, "num_classes") if call.name == "one_hot" else (2, "minlength")
    if call.arg(*width, -1) in (-1, 0):
        advice = WIDTH if call.name == "one_hot" else DEGREES
        raise LocalUse(f"takes the width of '{call.name}' from the largest number {OVER}", advice)
    if call.name == "one_hot":
        return call.kind(t)
    return Kind(ROWS) if call.kind(t) == Kind(ENDS) else Kind(SHARE)


def multiplied(call: Call, out: Tensor) -> Kind | None:
    """Products of matrices: what contracts rows is a share, and every row with every other one is local."""
    a, b = (call.args[k] for k in PRODUCTS[call.name])
    i, j = call.rows(a), call.rows(b)
    if call.name != "outer":
        contracted = b.dim() - 1 if call.name in ("linear", "inner") else max(b.dim() - 2, 0)
        if i == a.dim() - 1 or j == contracted:
            share = Kind(SHARE, size=a.size(-1))
            return added(call, share) if call.name in PRODUCTS_PLUS else share
    if SHARE in call.whats:
        raise LocalUse(f"'{call.name}' makes use {SUMMED}", SUM_UP)
    if i is not None and j is not None and (i - a.dim() != j - b.dim() or i >= a.dim() - 2):
        raise LocalUse(f"multiplies every row with every other one ('{call.name}') {OVER}", BEFORE)
    if call.name == "outer":
        return Kind(ROWS, 0 if j is None else 1)
    for row, t, other in ((i, a, b), (j, b, a)):
        if row is not None:  # counted from the right, where a vector takes a dimension away behind it
            return Kind(ROWS, max(out.dim() - (t.dim() - row) + (other.dim() == 1 and row < t.dim() - 1), 0))
    return aligned(call, out)  # of what is added to the product


def summed(call: Call, out: Tensor) -> Kind | None:
    """Products by Einstein's notation."""
    equation, *operands = call.args
    operands = list(operands[0]) if operands and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return aligned(call, out)
    left, right = equation.replace(" ", "").split("->")
    rows = [(term, call.rows(t), t) for term, t in zip(left.split(","), operands, strict=True)]
    letters = {term[row]: t.size(row) for term, row, t in rows if row is not None}
    if not letters:
        return aligned(call, out)
    free = [letter for letter in letters if letter in right]
    if free and len(letters) > 1:
        raise LocalUse(f"combines every row with every other one ('einsum') {OVER}", BEFORE)
    return Kind(ROWS, right.index(free[0])) if free else Kind(SHARE, size=max(letters.values()))


def along(call: Call, out: Tensor) -> Kind | None:
    """What slides a window along the last dimensions, or gives each slice of one a norm."""
    t, kind = call.first()
    if call.name == "renorm":
        return whole(call, out) if call.arg(2, "dim") % t.dim() != kind.dim else aligned(call, out)
    window = call.arg(1, "weight").shape[2:]
    place = kind.dim - t.dim() + len(window)
    slides = t is call.arg(0, "input") and place >= 0 and window[place] > 1
    return whole(call, out) if slides else aligned(call, out)


def put(call: Call, out: Tensor) -> Kind | None:
    """Rows that are added up by their numbers."""
    t, keys = call.args[:2]
    by_rows = any(call.rows(key) is not None for key in keys)
    if call.rows(t) is not None or not by_rows:
        return call.kind(t)
    return Kind(SHARE) if call.arg(3, "accumulate") else None


def dotted(call: Call, out: Tensor) -> Kind | None:
    """Products over any dimensions: what contracts rows is a share."""
    (a, b), dims = call.args[:2], call.arg(2, "dims", 2)
    over = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    rest = [
        [d for d in range(t.dim()) if d not in {k % t.dim() for k in of}] for t, of in zip((a, b), over, strict=True)
    ]
    places = [k * len(rest[0]) + rest[k].index(row) if row in rest[k] else None
              for k, row in enumerate((call.rows(a), call.rows(b))) if row is not None]  # fmt: skip
    if None in places:
        return Kind(SHARE)
    if len(places) > 1:
        raise LocalUse(f"multiplies every row with every other one ('tensordot') {OVER}", BEFORE)
    return Kind(ROWS, places[0] or 0)


def recurrent(call: Call, out: Tensor) -> Kind | None:
    """Networks over sequences: rows may be a batch of these, but no sequence."""
    t, kind = call.first()
    packed = isinstance(call.args[1], Tensor) and not call.args[1].is_floating_point()
    among = not packed and t is call.args[0] and kind.dim == int(bool(call.args[-1]))  # "batch_first"
    return whole(call, out) if among else aligned(call, out)


def whole(call: Call, out: Tensor) -> Kind | None:
    """What sees all numbers at once."""
    raise LocalUse(f"takes '{call.name}' {OVER}", BEFORE)


def attended(call: Call, out: Tensor) -> Kind | None:
    """Attention among rows, or distances between them."""
    t, kind = call.first()
    among = kind.dim == 0 if call.name == "multi_head_attention_forward" else kind.dim == t.dim() - 2
    if call.name == "cdist":
        among = among and None not in (call.rows(call.args[0]), call.rows(call.args[1]))
    return whole(call, out) if among else aligned(call, out)


RULES: dict[Callable[[Call, Tensor], Kind | None], Iterable[str]] = {
    permuted: PERMUTES, kept: CUTS, viewed: VIEWS, stacked: names("stack"), taken: names("select unbind"),
    flat: names("nonzero argwhere masked_select where"), read: names("index_select gather"), chosen: names("getitem"),
    scattered: SCATTERS, dotted: names("tensordot"), put: names("index_put"),
    along: names("conv1d conv2d conv3d renorm"),
    counted: names("one_hot bincount"), multiplied: PRODUCTS, summed: names("einsum"),
    attended: names("scaled_dot_product_attention multi_head_attention_forward cdist"),
    recurrent: names("gru lstm rnn_tanh rnn_relu"), whole: names("histc histogram dist"),
    normalised: {*NORMS, *LAYER_NORMS}, matrix: names("svd qr pinverse matrix_exp cov corrcoef pdist"),
}  # fmt: skip
RULE = {name: rule for rule, found in RULES.items() for name in found}
# What may take a sum over this worker's rows together with rows: to add more of these to it, to differentiate it, or to
# know by it how many of them belong together.
ONTO_SHARES = {
    *SCATTERS,
    *PRODUCTS,
    *LIKE,
    *names("grad backward foreach_add index_put copy segment_reduce tensor_split"),
}


def divisor(call: Call) -> Any:
    """Return by what a call divides, if it does."""
    return call.arg(DIVIDES[call.name], "other") if call.name in DIVIDES else None


def taken_for_all(call: Call) -> str:
    """Return what is wrong with a call that takes the number of this worker's nodes for that of all, if it does."""
    if call.name not in ("randint", "eye"):
        return ""
    given = dict(enumerate(call.args)) | call.kwargs
    if call.name == "eye":
        return FEATURES if isinstance(given.get("n", given.get(0)), Count) else ""
    high = given.get("high", given.get(1) if isinstance(given.get(1), int) else given.get(0))
    return DRAWS if isinstance(high, Count) else ""


def told_apart(call: Call) -> int:
    """Return the number by which a call tells destinations apart, as ``edge_index[1] < 100`` does; 0 if it does not."""
    if call.name not in ("eq", "ne", "lt", "le", "gt", "ge", "remainder") or ENDS not in call.whats:
        return 0
    return next((int(n) for n in call.args if type(n) is int), 0)


def of_share(call: Call) -> Kind | None:
    """What comes of sums over this worker's rows."""
    name, shares = call.name, [k for _, k in call.kinds if k is not None and k.what == SHARE]
    if name in COMPARES:  # to ask whether there are any rows is no use of their number
        return None
    if name == "copy":
        return call.kind(call.args[1])
    below = divisor(call)
    twice = name in {"mul", *PRODUCTS} and (len(shares) > 1 or LOSS in call.whats)
    real = any(t.is_floating_point() for t, k in call.kinds if k in shares)
    curved = name in CURVED or (name in COMPARED and real)
    if curved or twice or call.kind(below) in shares:
        raise LocalUse(f"takes '{name}' {SUMMED}", SUM_UP)
    count = shares[0].size
    if type(below) in (int, float) and below == count > 1:
        why = f"divides a sum over this worker's {count} rows by their number, which is a mean {OVER}"
        raise LocalUse(why, MEAN, sure=False)  # it may be that of all workers, of whom only this one has some
    kind = Kind(SHARE, size=count)
    return added(call, kind) if name in ADDS | PRODUCTS_PLUS else kind


def of_loss(call: Call) -> Kind | None:
    """What comes of a loss."""
    if call.name == "grad":  # of parameters
        return None
    if call.name in {"backward", "detach", *COMPARES}:
        return Kind(SAME if call.name == "detach" else LOSS)
    return added(call, Kind(LOSS))


def added(call: Call, kind: Kind) -> Kind:
    """What is made of parameters alone must not join what has the gradient of this worker's share."""
    factors = () if kind.what == LOSS else PRODUCTS.get(call.name, ())  # a weight of a sum, not in the place of a bias
    joined = tensors([t for k, t in enumerate((*call.args, *call.kwargs.values())) if k not in factors])
    if torch.is_grad_enabled() and any(t.requires_grad and (call.kind(t) or kind).what == SAME for t in joined):
        why = f"joins ('{call.name}') to a loss or a sum, of which each has its share, what {COUNTED}"
        raise LocalUse(why, REPLICATED)
    return kind
