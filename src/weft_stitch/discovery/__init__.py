"""Which channels of which models are the same, found from their weights: ``discover``.

``search`` runs the steps. ``evidence`` has the fingerprints of weights, ``partition`` the channels that are held to be
shared. ``matching`` joins channels whose weights agree, exactly or within a tolerance, ``comparison`` separates
those that do not, and proves the result number by number.
"""

from weft_stitch.discovery.search import discover

__all__ = ["discover"]
