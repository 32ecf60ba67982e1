r"""Training of graphs whose rows do not fit: rows live in host memory or in files, and are computed on some at a time.

The destination loop of `"HongTu: Scalable Full-Graph GNN Training on Multiple GPUs" <https://arxiv.org/abs/2311.14898>`_
(SIGMOD 2023), around the loop over source blocks.

* ``home``: where rows live.
* ``place``: what rows of a set of nodes have in common.
* ``rows``: a tensor that stands for rows at home, or for what functions make of them.
* ``passes``: functions on one range of rows after the other.
* ``functions``: those that do not treat each row by itself.
* ``chunks``: aggregations on one chunk of destinations after the other.
* ``dropout``: dropout of rows, which backward draws again.
* ``slots``: source rows that stay on an accelerator, as ``schedule`` decides.
* ``halo``: rows of other workers.
* ``counts``: what a budget depends on, and small graphs that have it.
* ``plan``: how many chunks fit a budget.
* ``move``: what moves loaded data there.
* ``data``: the call that users make.
"""
