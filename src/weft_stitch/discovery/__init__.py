"""Finds which channels of models are the same, by their weights: ``discover``.

``search`` runs the steps. ``evidence`` computes fingerprints of weights, ``partition`` holds the classes of channels
that are taken to be shared. ``matching`` joins channels whose weights agree, exactly or within a tolerance,
``comparison`` separates those whose weights do not, and verifies the result number by number.
"""

from weft_stitch.discovery.search import discover

__all__ = ["discover"]
