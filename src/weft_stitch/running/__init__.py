"""Stitched graphs at run time: ``module`` in torch, ``fused_body`` for backbones, ``sessions`` in ONNX Runtime.

``gpu_timing`` and ``kernel_shapes`` measure and tune the CUDA kernels.
"""
