"""Graphs in torch: ``module`` runs one, ``fused`` and ``kernel`` its CUDA form, ``clock`` and ``rivals`` measure it."""
