"""Compiled loops: arrays in, arrays out, no other module of the package. Each has a plain twin.

All numbers are int64 ticks. ``fetch`` and ``compute`` hold the layers of all streams one after
another; stream i owns ``offsets[i]`` to ``offsets[i + 1]``. A kernel fills ``chosen`` with the stream of
each issued layer and returns how many it issued; ``replay`` turns that order into times.

The buffer is kept as two running columns (P, PM) instead of a list that is scanned: P[j] is the ticks
fetched before issue j, PM[j] the running maximum of (compute end - P). A layer that ends at byte
position X + buffer is on chip at max(channel + size, PM[J] + X), J the last issue with P[J] < X.
X never decreases for a stream, so one forward pointer per stream replaces every scan (``buffer``).

The rules by which policies decide are in ``rules``, as plain functions that policies call and loops inline. A loop is
made of short functions (``compiling``): ``inlined`` ones, ``part``s, and a ``loop`` around them, which is cached on
disk.

The plain loop is the reference. ``engine/compiled.py`` knows which policies have a kernel (``layerweaver``, ``aimt``,
``weft``, and policies of whole queries) and asks it for the order of issues; the times of that order come from
``kernels/replay.py``. For requests, ``kernels/request_loop.py`` is the whole loop, fed with arrivals block by block, on
an NPU or on the lanes of ``host_lanes.py``; ``weft_cluster/kernels/cluster_loop.py`` runs it for every machine of a
cluster, period by period. Its modules: ``request_state.py`` (arrays by column), ``request_queues.py`` (requests that
come, wait and are answered), ``choosing.py`` (policies) and ``refilling.py`` (policies that refill batches). Because a
tick is a byte's time on the channel, all sums are whole numbers and may be regrouped, so the kernels keep running
maxima (``kernels/buffer.py``) where the plain loop scans a list, and still make the same decisions to the last tie
(``tests/kernels/test_kernels.py``).

Loops are written twice, rules are written once. ``kernels/rules.py`` holds the rules: order of queries, tokens, slack,
idle time, as functions of numbers without numba. ``engine/policies/edf.py`` calls
``rules.edf_key(c.deadline, c.arrival)`` for each candidate; ``kernels/choosing.py`` has ``edf_key =
inlined(rules.edf_key)`` and calls that for each row of its table. To change a rule, change it there.
``tests/kernels/test_rules.py`` plants a fault in each rule and sees policy and loop change alike. Queues, batches and
lateness in ``kernels/request_queues.py`` are twins of ``engine/requests.py``, ``queues.py``, ``batches.py`` and
``admission.py``; lanes in ``host_lanes.py`` of ``engine/simulated_host.py``; the weight buffer in ``kernels/buffer.py``
of ``devices/decoupled.py``.
"""
