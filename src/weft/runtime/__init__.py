"""Real execution on ONNX Runtime: models cut into segments, measured, and run on lanes.

Its modules: ``backend.py``, the protocol; ``facets.py``, the parts of a loaded model; ``backends.py``, backends by
name; ``onnxruntime_cpu/``, the first; ``isolated/``, the same in worker processes, with ``breaker.py``, the circuit
breaker; ``cuda/``, models on a GPU in such a worker, with a twin on the CPU (``cuda/partitions.py``,
``cuda/likeness.py``: its partitions and how models run on them; ``cuda/rounds.py``: stitched models;
``isolated/residency.py``: eviction from its memory; ``isolated/device.py``: one GPU or several); ``lanes.py``, the
executor in real time; ``device_kinds.py``, what ``--device`` names; ``cutting.py``, where a graph is cut;
``values.py``, what inputs decide; ``rows.py``, which rows may be computed together; ``client_memory.py``, tensors that
a device takes from where its client has them; ``stitched.py``, the tasks of a stitched file; ``samples.py``, random or
stored inputs; ``timing.py``, alternatives timed in turns.
"""
