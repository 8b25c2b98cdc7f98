"""Number formats of any width, and arithmetic in them.

``format`` says what a format is, ``spelling`` how it is written, ``configuration`` which object has which. ``arrays``
rounds, encodes and decodes, ``packing`` packs codes into bytes, ``scalar`` computes with single numbers. ``rounding``
and ``plain`` define what ``loops`` and the compiled kernels do fast.
"""
