"""The tests, in the rooms of the package; helpers stand in the room of what they help to test."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
DATA = ROOT / "tests" / "data"
"""Validation data, with its sources."""
