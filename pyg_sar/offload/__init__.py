r"""Training of graphs whose rows do not fit: rows live in host memory or in files, and are computed on some at a
time.
"""
