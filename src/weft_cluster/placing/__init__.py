"""Which models share which machine: from demands and machines to a placement, with a bound beside it.

``machines`` and ``demand`` are what is given, ``needs`` makes demands of profiles; ``problem`` has both as arrays,
``filling`` is a placement in the making, ``placement`` the finished one.

``machines.py`` and ``demand.py`` (what is given), ``needs.py`` (demands of profiles), ``problem.py`` (both as arrays:
two linear loads per model and kind), ``refusals.py`` (what fits nowhere), ``bound.py`` (a linear programme over
machines that are alike), ``search.py`` with ``fewest.py`` and ``packing.py`` (``balancing.py``, then ``resharing.py``,
and ``exact.py`` for few), ``judging.py`` and ``moves.py`` (simulated as in ``pieces.py``, and changed); ``filling.py``
is a placement in the making, held to every limit, ``placement.py`` is the value, ``summary.py`` makes it, ``folder.py``
writes it and its page; ``adapting.py`` (``settling.py``) adapts one to what changed, ``change.py`` says what that
takes.
"""
