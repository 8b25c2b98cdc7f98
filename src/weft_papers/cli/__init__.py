"""The command ``weft reproduce``."""
