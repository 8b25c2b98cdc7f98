"""Number formats of any width, and arithmetic in them.

``format`` defines formats and their text, ``configuration`` which object has which. ``arrays`` rounds, encodes, decodes
and packs arrays. ``plain`` holds the formulas; ``loops`` chooses the compiled kernels that must equal them.
"""
