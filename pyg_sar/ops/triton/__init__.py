r"""The block-level operators on GPUs, in Triton: see :mod:`pyg_sar.ops` and, for what they compute,
:mod:`pyg_sar.ops.reference`.

One operator family a file; :mod:`~pyg_sar.ops.triton.schedule` shares edges out to programs. Rows are of half, single
or double precision, sums of single at least. Without a GPU, Triton's interpreter runs them (``TRITON_INTERPRET=1``).
"""

from pyg_sar.ops.reference import huge_pages_, zero_
from pyg_sar.ops.triton.attention import attention_
from pyg_sar.ops.triton.attention_grad import additive_grad_, attention_grad_
from pyg_sar.ops.triton.columns import column_affine_, column_products_, moments_
from pyg_sar.ops.triton.dropout_rows import dropout_rows_
from pyg_sar.ops.triton.extremum import extremum_, extremum_grad_
from pyg_sar.ops.triton.sum import row_products_, sddmm_, spmm_

__all__ = [
    "additive_grad_", "attention_", "attention_grad_", "column_affine_", "column_products_",
    "dropout_rows_", "extremum_", "extremum_grad_", "huge_pages_", "moments_", "row_products_", "sddmm_", "spmm_",
    "zero_",
]  # fmt: skip
