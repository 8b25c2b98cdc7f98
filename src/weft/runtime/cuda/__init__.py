"""Models on a GPU: cut into segments that are captured as CUDA graphs, and run on one lane per device.

``device`` declares the operations of a device (streams, events, graphs) and has their twin on the CPU, which does
everything at once; ``gpu`` implements them with torch. ``segments`` opens the pieces of a model over shared weights,
``rung`` has them at one batch size with memory of their own, ``model`` runs steps and ``lane`` reports their ends.
``preparing`` loads a file: ``onnx_files`` for ONNX Runtime, ``torch_files`` for torch itself (``torch_program``), and
``preparation`` cuts and measures both into ``pieces``. ``torch_onnx`` converts ONNX files to torch, which runs them
(``torch_eager``) until a process of its own (``compiling``, ``torch_compiler``, ``torch_pieces``) has compiled them, or
programs, from ``torch_modules`` to ``packages``, which ``torch_runner`` runs and ``torch_engine`` compares with what
ran before. Stitched files are computed in ``rounds``, with graphs from ``round_graphs``. ``precision`` converts models
to 16 bits, ``engine`` is what a worker process runs, ``requirements`` reports what is missing on a machine, and
``kind`` is what ``--device cuda:0`` is registered with; ``cpu_twins`` stand for GPUs in tests.
"""
