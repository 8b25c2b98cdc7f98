"""Models on a GPU: cut into segments that are captured as CUDA graphs, and run on one lane per device.

``device`` is what the rest knows of streams, events and graphs, with a twin on the CPU that does everything at once;
``gpu`` is the real one, over torch. ``segments`` opens the pieces of a model over weights that all of them share,
``rung`` has them at one batch size with memory of their own, ``model`` runs steps and ``lane`` tells of their ends.
``preparing`` loads a file: ``onnx_files`` for ONNX Runtime, ``torch_files`` for torch itself (``torch_program``), and
``preparation`` cuts and measures both into ``pieces``. Stitched files are computed in ``rounds``, for which
``round_graphs`` has the graphs. ``precision`` converts, ``engine`` is what a worker process has, ``requirements`` says
what is missing on a machine without, and ``kind`` is what ``--device cuda:0`` is registered with; ``cpu_twins`` stand
for GPUs in tests.
"""
