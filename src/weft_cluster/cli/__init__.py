"""The commands ``weft place``, ``weft cluster`` and ``weft ray``."""
