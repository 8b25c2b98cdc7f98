"""Many machines behind a router: the choice of a machine for a request, and the simulation of a cluster.

Its modules: ``placing_run.py``, all that ``weft place`` decides, placements for a router among it; ``router.py``, pure
functions of estimates, a request and the time; ``cluster.py``, what is simulated, slow machines and failures among it;
``lowered.py``, the same in ticks; ``plain.py``, an engine per machine, and ``compiled.py``, its twin
(``kernels/cluster_loop.py``); ``simulate.py``, the results; ``traffic.py``,
generated requests of many models, fitted to recorded ones (``traces.py``).
"""
