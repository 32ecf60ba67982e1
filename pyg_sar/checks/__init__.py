"""What :func:`pyg_sar.check` is made of."""
