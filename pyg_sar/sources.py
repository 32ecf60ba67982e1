r"""What local source rows are made of, column tile by column tile, and what takes their gradients.

The comments give shapes for ``N`` local source rows of ``F`` columns, and ``I`` input features of projected rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_sar.linear import linear, linear_grad, product
from pyg_sar.ops import empty
from pyg_sar.reduce.base import columns


class LocalRows:
    """Local source rows as they are.

    Args:
        x: The rows, ``[N, *]``.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.inputs: tuple[Tensor, ...] = (x,)  # what autograd differentiates by

    @property
    def like(self) -> Tensor:
        """An empty tensor of such rows, ``[0, *]``."""
        return self.x.new_empty(0, *self.x.shape[1:])

    def tile(self, which: slice) -> Tensor:
        """Return some columns of the rows."""
        return columns(self.x, which)


class ProjectedRows(LocalRows):
    r"""Local source rows :math:`\mathbf{W} \mathbf{x} + \mathbf{b}`, of which a column tile is made when it is asked
    for: when its turn to be sent has come.

    Args:
        x: The features, ``[N, I]``.
        weight: The weight, ``[F, I]``.
        bias: The bias, ``[F]``, or None.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self.x, self.weight = x, weight
        self.inputs = (x, weight) if bias is None else (x, weight, bias)

    @property
    def like(self) -> Tensor:
        """An empty tensor of such rows, ``[0, F]``."""
        return self.x.new_empty(0, self.weight.size(0))

    def tile(self, which: slice) -> Tensor:
        """Make some columns of the rows."""
        return product(self.x, *(t[which] for t in self.inputs[1:]))

    def project(self) -> Tensor:
        """Make all columns at once, under autograd."""
        return linear(*self.inputs)


class LocalGrads:
    """Takes the gradients of :class:`LocalRows`.

    Args:
        shape: The shape of the rows.
        tiles: The columns of each tile.
    """

    def __init__(self, shape: Sequence[int], tiles: Sequence[slice]) -> None:
        self.shape, self.tiles = shape, tiles
        self.d_x: Tensor | None = None

    def add_grad(self, tile: int, grad: Tensor) -> None:
        """Take the gradient of a tile, ``[N, F of the tile]``, which comes once."""
        if len(self.tiles) == 1:
            self.d_x = grad
            return
        if self.d_x is None:
            self.d_x = empty(grad, *self.shape)
        self.d_x[..., self.tiles[tile]] = grad

    def grads(self) -> list[Tensor | None]:
        """Return the gradient of each input."""
        return [self.d_x]


class ProjectedGrads:
    """Takes the gradients of :class:`ProjectedRows` and makes those of features, weight and bias of them.

    Args:
        rows: The rows.
        wants: Which of their inputs need a gradient.
        tiles: The columns of each tile.
    """

    def __init__(self, rows: ProjectedRows, wants: Sequence[bool], tiles: Sequence[slice]) -> None:
        self.rows, self.tiles, self.wants_x = rows, tiles, wants[0]
        # The first tile writes the gradient of the features, to which others add; each writes its rows of the others.
        self.d_x: Tensor | None = None
        self.d_w = [torch.empty_like(t) if want else None for t, want in zip(rows.inputs[1:], wants[1:], strict=True)]

    def add_grad(self, tile: int, grad: Tensor) -> None:
        """Take the gradient of a tile, ``[N, F of the tile]``, which comes once."""
        which = self.tiles[tile]
        d_weight_and_bias = [None if d is None else d[which] for d in self.d_w]
        first = self.d_x is None
        if first and self.wants_x:
            self.d_x = empty(self.rows.x, *self.rows.x.shape)
        linear_grad(self.rows.x, grad, self.rows.weight[which], self.d_x, *d_weight_and_bias, add=not first)

    def grads(self) -> list[Tensor | None]:
        """Return the gradient of each input."""
        return [self.d_x, *self.d_w]
