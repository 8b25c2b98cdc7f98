"""Which models share which machine: from demands and machines to a placement, with a bound beside it.

``machines`` and ``demand`` are what is given, ``needs`` makes demands of profiles; ``problem`` has both as arrays,
``filling`` is a placement in the making, ``placement`` the finished one.
"""
