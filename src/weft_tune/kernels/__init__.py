"""Compiled rounding and packing of numbers."""
