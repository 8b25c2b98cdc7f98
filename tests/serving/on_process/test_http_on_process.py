"""Requests over HTTP: what they ask, how they are refused, who goes away."""

from tests.serving.test_serve_http import *  # noqa: F403
