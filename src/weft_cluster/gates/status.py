"""How a cluster stands, asked of a gate."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from weft.base.errors import InputError
from weft.http.client import Pool, call, parse_url, request_bytes, unreachable


def cluster_status(url: str, key: str | None = None) -> dict[str, Any]:
    """What a gate says of the servers behind it (``Gate.told``); InputError where nobody says anything."""
    return asyncio.run(_asked(url, key))


async def _asked(url: str, key: str | None) -> dict[str, Any]:
    pool = Pool(parse_url(url), 1)
    try:
        await pool.open(1)
        answer = await call(pool, request_bytes(pool.target, "GET", "weft/cluster", key=key))
    except OSError as error:
        raise InputError(unreachable(url, error, "weft ray up")) from error
    finally:
        await pool.close()
    if answer.status != 200:
        raise InputError(f"{url}: GET weft/cluster has status {answer.status}; is it a gate, and its key right?")
    found: dict[str, Any] = json.loads(answer.body)
    return found
