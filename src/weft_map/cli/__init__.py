"""The commands of ``weft map``."""
