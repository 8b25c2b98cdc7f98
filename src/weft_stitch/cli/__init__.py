"""The commands ``weft stitch`` and ``weft models generate``."""
