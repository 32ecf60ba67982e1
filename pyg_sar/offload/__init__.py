r"""Training graphs whose rows do not fit: destination chunks on a device, all rows in host memory or on disk.

The destination loop of `"HongTu: Scalable Full-Graph GNN Training on Multiple GPUs"
<https://arxiv.org/abs/2311.14898>`_ (SIGMOD 2023), on top of the loop over source blocks.
"""
