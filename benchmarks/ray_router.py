"""A router of Serve's handles that chooses by the latest reports of the replicas (``ray_handles.py``)."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter


class EarliestRouter(RequestRouter):  # type: ignore[misc]
    """Where least waits."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        return [sorted(candidate_replicas, key=lambda each: each.routing_stats.get("ahead", 0))]
