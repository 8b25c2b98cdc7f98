"""Placement: which models share which machine. From demands and machines to a placement and a bound for it.

- Input: ``machines.py`` (the file), ``demand.py``, ``needs.py`` (demands from profiles), ``problem.py`` (both as
  arrays: two linear loads per model and kind), ``refusals.py`` (models that fit nowhere).
- Search: ``bound.py`` (a linear programme over machines that are alike), ``search.py`` (fewest machines, packing) with
  ``balancing.py``, ``resharing.py`` and ``exact.py``; ``judging.py`` simulates machines (``pieces.py``), ``moves.py``
  improves them; ``alpaserve.py`` is the greedy replication.
- Output: ``filling.py`` (a placement under construction, with its limits), ``placement.py`` (the value), ``summary.py``
  (from one to the other), ``folder.py`` and ``placement_shown.py`` (files, tables).
- Changes: ``adapting.py``, and ``change.py`` (loads and drops).
"""
