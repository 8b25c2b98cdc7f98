"""Number formats of any width, and arithmetic in them.

``format`` defines formats and their text, ``configuration`` which object has which. ``arrays`` rounds, encodes, decodes
and packs arrays by compiled loops (``weft_tune.kernels``); ``plain`` holds the formulas that these must equal.
"""
