"""What models are like on shares of a GPU: a server that shares it measures them there when it loads them."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from weft.devices import Host
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.planning.survey.measure import Subject
from weft.serving.process import ServerProcess
from weft.serving.sharing import UNMEASURED

POLICY = "slices"
"""One that shares, and has models take turns."""


def with_shares(host: Host, subjects: Sequence[Subject], cache: Path | None = None) -> Host:
    """*host*, which is a GPU, and how it can be shared by these models."""
    with tempfile.TemporaryDirectory() as folder:
        kept = str(folder if cache is None else cache)
        files = dict.fromkeys(subject.file for subject in subjects)
        arguments = ["--policy", POLICY, "--device", host.name, "--grpc-port=-1", "--cache", kept]
        with (
            ServerProcess(*files, *arguments) as server,
            urllib.request.urlopen(f"{server.url}/weft/profile", timeout=30) as answer,
        ):
            told = json.load(answer)
    if told["gpu"] is None:  # none of them runs there
        return host
    models = {}
    for name, model in host.models.items():
        like = {int(rows): GpuLikeness.model_validate(each) for rows, each in told["models"][name]["like"].items()}
        models[name] = model.model_copy(update={"like": like or {1: UNMEASURED}})
    return host.model_copy(update={"gpu": GpuCuts.model_validate(told["gpu"]), "models": models})
