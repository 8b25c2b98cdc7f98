"""Placement: which models share which machine. From demands and machines to a placement and a bound for it.

- Input: ``machines.py`` (the file), ``demand.py`` (demands from profiles), ``problem.py`` (both as
  arrays: two linear loads per model and kind; and models that fit nowhere).
- Search: ``bound.py`` (a linear programme over machines that are alike), ``search.py`` (fewest machines, packing, small
  problems exactly) with ``resharing.py``; ``judging.py`` simulates machines, and improves them.
- Output: ``filling.py`` (a placement under construction, with its limits), ``placement.py`` (the value), ``summary.py``
  (conversion between them), ``placement_shown.py`` (tables, the folder).
- Changes: ``adapting.py`` (a new placement, and the weights to load and drop).
"""
