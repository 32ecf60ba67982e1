"""The machinery of ``convert``: runs layers of PyG, or of users, as they are on a sharded graph.

.. code-block:: text

    dispatch   a layer's call on a sharded graph
       |
    choose     its execution strategy, inferred at the first call with such arguments
       |          probe     run the layer's code on a small random graph: what are its reductions by destination?
       |          verify    does a candidate compute there what the layer's own code does?
       |          agree     the first strategy that passes on all workers
    strategy   run the call
                  aggregate   messages are source rows: a kernel
                  passes      block by block, reductions merged
                  chunks      some destinations at a time, with all their edges
                  by_chunks   the same on rows at home

``runner`` runs the layer's ``propagate`` on some edges; ``trace`` cuts the reductions out of it; ``isolate`` keeps the
layer as it is meanwhile; ``call`` sorts the arguments by what their rows stand for.
"""
