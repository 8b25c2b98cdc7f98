"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, so that a commit passes or fails once and for all.
# To look for new ones: pytest --hypothesis-profile=explore
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("steady")
