"""Requests to a server that runs in a test."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.serving import live


def infer_fp32(server: live.Live, model: str, feed: Mapping[str, Any]) -> Any:
    """Send float32 inputs as JSON, and return the model's only output as an array. ``HTTPError`` if it is refused."""
    inputs = [
        {"name": name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
        for name, array in feed.items()
    ]
    request = urllib.request.Request(
        f"{server.url}/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=live.PATIENCE_S) as answer:
        (output,) = json.load(answer)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])
