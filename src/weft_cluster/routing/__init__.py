"""Many machines behind a router: the choice of a machine for a request, and the simulation of a cluster.

Its modules: ``placing_run.py``, the decisions of ``weft place``, with placements for a router; ``router.py``, pure
functions of estimates, a request and the time; ``cluster.py``, a cluster and its settings, such as slow machines and
failures; ``lowered.py``, the same in ticks; ``plain.py``, an engine per machine, and ``compiled.py``, its twin
(``kernels/cluster_loop.py``); ``simulate.py``, the results; ``traffic.py``, generated requests of many models, fitted
to recorded ones (``traces.py``).
"""
