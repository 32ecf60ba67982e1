"""Offline work on graphs: data sets, partitions and their order, the folders that hold them, and reading these."""
