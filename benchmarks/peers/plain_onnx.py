"""Models in ONNX Runtime behind Starlette and uvicorn, with batches: what one writes who takes no server of others.

Run: python plain_onnx.py MODELS.json DEVICE ROWS [--tuned]. It prints its port once every model is warm, and speaks as
much of the Open Inference Protocol as requests of one row with binary tensors need. A batch goes when it has ROWS rows,
or when its first one has waited for 2 ms. A model is one session with the defaults of ONNX Runtime, which plans
convolutions anew whenever the number of rows changes; with --tuned it is a session for each of 1, 2, 4 ... rows, up to
which batches are filled, and has channels last.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

WAIT_S = 0.002
TYPES = {"FP32": np.float32, "INT64": np.int64}
NAMES = {"float32": "FP32", "int64": "INT64"}
TUNED = {"prefer_nhwc": 1, "cudnn_conv_algo_search": "HEURISTIC"}

Tensors = dict[str, Any]


class Waiting(NamedTuple):
    """A request of one row."""

    inputs: Tensors
    since_s: float
    answer: asyncio.Future[Tensors | None]


class Batched:
    """A model, and the requests that wait for it."""

    def __init__(self, path: str, device: str, rows: int, *, tuned: bool) -> None:
        self.rows, self.sizes = rows, [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < rows] + [rows]
        if tuned:
            self.sessions = {size: session(path, device, TUNED) for size in self.sizes}
        else:
            self.sessions = dict.fromkeys(range(1, rows + 1), session(path, device, {}))
        self.outputs = [each.name for each in self.sessions[rows].get_outputs()]
        self.waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1)

    def warm(self) -> None:
        """Have every size seen twice, so that nothing is chosen or laid out later."""
        drawn = {
            each.name: np.zeros([1, *each.shape[1:]], np.float32 if "float" in each.type else np.int64)
            for each in self.sessions[self.rows].get_inputs()
        }
        for size in self.sizes * 2:
            self.run([drawn] * size)

    def run(self, batch: list[Tensors]) -> list[Tensors]:
        """The outputs of each row."""
        size = next(each for each in self.sessions if each >= len(batch))
        filled = [*batch, *[batch[-1]] * (size - len(batch))]
        feed = {name: np.concatenate([each[name] for each in filled]) for name in batch[0]}
        made = self.sessions[size].run(self.outputs, feed)
        return [
            {name: each[row : row + 1] for name, each in zip(self.outputs, made, strict=True)}
            for row in range(len(batch))
        ]

    async def asked(self, inputs: Tensors) -> Tensors | None:
        """The outputs of one row; None where they could not be computed."""
        loop = asyncio.get_running_loop()
        request = Waiting(inputs, loop.time(), loop.create_future())
        self.waiting.put_nowait(request)
        return await request.answer

    async def work(self) -> None:
        """Batch after batch, without end."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._collected()
            made: list[Tensors] | None = None
            try:
                made = await loop.run_in_executor(self.thread, self.run, [each.inputs for each in batch])
            except Exception as error:  # ONNX Runtime raises several unrelated kinds
                print(error, file=sys.stderr, flush=True)
            for row, each in enumerate(batch):
                if not each.answer.done():
                    each.answer.set_result(made[row] if made else None)

    async def _collected(self) -> list[Waiting]:
        batch = [await self.waiting.get()]
        while len(batch) < self.rows:
            try:
                if self.waiting.empty():
                    async with asyncio.timeout_at(batch[0].since_s + WAIT_S):
                        batch.append(await self.waiting.get())
                else:
                    batch.append(self.waiting.get_nowait())
            except TimeoutError:
                break
        return batch


def session(path: str, device: str, options: dict[str, Any]) -> Any:
    """A model on a GPU, or on the cores if the device is the twin of one."""
    if device.endswith("twin"):
        return ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    import torch  # noqa: F401  # brings the libraries that the provider needs

    chosen = ("CUDAExecutionProvider", {"device_id": int(device.partition(":")[2]), **options})
    made = ort.InferenceSession(path, providers=[chosen, "CPUExecutionProvider"])
    if made.get_providers()[0] != chosen[0]:
        raise SystemExit(f"{path}: not on {device}, only {made.get_providers()} would run it")
    return made


def decoded(body: bytes, length: int) -> Tensors:
    """The tensors of a request whose JSON has so many bytes."""
    at, found = length, {}
    for each in json.loads(body[:length])["inputs"]:
        kind, size = np.dtype(TYPES[each["datatype"]]), each["parameters"]["binary_data_size"]
        found[each["name"]] = np.frombuffer(body, kind, size // kind.itemsize, at).reshape(each["shape"])
        at += size
    return found


def encoded(name: str, tensors: Tensors) -> Response:
    told = [
        {
            "name": key,
            "shape": each.shape,
            "datatype": NAMES[each.dtype.name],
            "parameters": {"binary_data_size": each.nbytes},
        }
        for key, each in tensors.items()
    ]
    text = json.dumps({"model_name": name, "outputs": told}).encode()
    body = b"".join([text, *(each.tobytes() for each in tensors.values())])
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(body, media_type="application/octet-stream", headers=headers)


def application(models: dict[str, Batched]) -> Starlette:
    async def infer(request: Request) -> Response:
        name, length = request.path_params["name"], int(request.headers["inference-header-content-length"])
        made = await models[name].asked(decoded(await request.body(), length))
        return Response(status_code=500) if made is None else encoded(name, made)

    @asynccontextmanager
    async def working(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each.work()) for each in models.values()]
        yield
        for each in tasks:
            each.cancel()

    return Starlette(routes=[Route("/v2/models/{name}/infer", infer, methods=["POST"])], lifespan=working)


def main(file: str, device: str, rows: str, *options: str) -> None:
    listed = json.loads(Path(file).read_text())
    models = {name: Batched(path, device, int(rows), tuned="--tuned" in options) for name, path in listed.items()}
    for each in models.values():
        each.warm()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
    config = uvicorn.Config(application(models), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
