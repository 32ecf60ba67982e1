r"""What :func:`pyg_sar.check` is made of: ``check`` is the function itself. ``sample`` makes a small random graph,
``run`` runs the step on it in one process and on simulated workers, ``record`` watches it meanwhile, and ``diagnose``
says what differs, what that usually means, and what to do.
"""
