"""The command ``weft tune``."""
