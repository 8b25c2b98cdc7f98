"""Compiled loops: arrays in, arrays out, no other module of the package. Each has a plain twin.

All numbers are int64 ticks. ``fetch`` and ``compute`` hold the layers of all streams one after
another; stream i owns ``first[i]`` to ``first[i + 1]``. A kernel fills ``chosen`` with the stream of
each issued layer and returns how many it issued; ``replay`` turns that order into times.

The buffer is kept as two running columns (P, PM) instead of a list that is scanned: P[j] is what was
fetched before issue j, PM[j] the running maximum of (compute end - P). A layer that ends at byte
position X + buffer is on chip at max(channel + size, PM[J] + X), J the last issue with P[J] < X.
X never decreases for a stream, so one forward pointer per stream replaces every scan (``buffer``).

What policies decide by stands in ``rules``, as plain functions that policies call and loops take in. A loop is made of
short functions (``compiling``): ``inlined`` ones, ``part``s, and a ``loop`` around them, which is kept on disk.
"""
