"""The tests, in the rooms of the package.

Helpers stand in modules of their room, those of several rooms in ``tests/support``; no test file imports another.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
DATA = ROOT / "tests" / "data"
"""Validation data, with its sources."""
