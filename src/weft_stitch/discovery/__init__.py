"""Which channels of which models are the same, found from their weights: ``discover``.

``search`` is the road through. ``evidence`` keeps what the weights say (``fingerprint`` makes them comparable,
``nearness`` within a tolerance) and ``partition`` what is held to be shared; ``matching`` guesses, ``voting`` and
``repair`` mend wrong guesses, ``comparison`` proves the result number by number.
"""

from weft_stitch.discovery.search import discover

__all__ = ["discover"]
