"""Real execution on ONNX Runtime: models cut into segments, measured, and run on lanes.

Its modules: ``backend.py``, the protocol; ``facets.py``, the parts of a loaded model; ``backends.py``, backends by
name; ``onnxruntime_cpu/``, the first; ``isolated/``, the same in worker processes, with ``breaker.py``; ``cuda/``,
models on a GPU in such a worker, with a twin on the CPU (``cuda/partitions.py`` and ``cuda/likeness.py``, parts of it
and what models are like there; ``cuda/rounds.py``, stitched ones; ``isolated/residency.py``, who is in its memory;
``isolated/devices.py``, several of them); ``lanes.py``, the executor whose time passes; ``device_kinds.py``, what
``--device`` names; ``model_kinds.py``, which kind a file is of; ``cutting.py``, where a graph is cut; ``values.py``,
what inputs decide; ``rows.py``, which rows may be computed together; ``client_memory.py``, tensors that a device takes
from where its client has them; ``stitched.py``, the tasks of a stitched file; ``samples.py``, inputs that are made up
or stored; ``timing.py``, alternatives timed in turns.
"""
