r"""How messages combine: each reduction is a few small functions over one block, without communication.

A reduction is a state that takes one source block after the other (``init``, ``step``, ``finish``) and the gradient of
one block (``grad``). ``needs_source`` says whether that gradient needs the source rows again: *case 2* of the SAR
paper, against *case 1*, in which walking the transposed block is enough. ``tiles`` cuts a reduction into column tiles,
so that narrow rows are communicated one tile after the other instead of wide ones at once.

Shapes in the comments of this package, for the block :math:`q` at hand:

* ``N`` source rows of the block, ``M`` local destinations, ``E`` edges of the block,
* ``F`` columns of source rows, ``H`` heads, ``C`` channels of a head, ``D`` features of an edge,
* ``K`` columns of an additive key (``H``) or of any other one (``H * C``).
"""

from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, Tile, divisor, head_groups
from pyg_sar.reduce.column_softmax import ColumnSoftmax
from pyg_sar.reduce.extremum import Extremum
from pyg_sar.reduce.projected_softmax import ProjectedSoftmax
from pyg_sar.reduce.relational import BasisSum, RelationSum
from pyg_sar.reduce.softmax import Softmax
from pyg_sar.reduce.sums import Sum

__all__ = [
    "BasisSum",
    "ColumnSoftmax",
    "Extremum",
    "Grads",
    "Needs",
    "ProjectedSoftmax",
    "Reduce",
    "RelationSum",
    "Rows",
    "Softmax",
    "Sum",
    "Tile",
    "divisor",
    "head_groups",
]
