"""Fine-tuned encoders stitched into one body on a GPU, behind weft's server: answers, memory, times, loading.

Encoders of 12 layers, width 768, with merged adapters of rank 16 (``weft models generate encoder``) are stitched with
``tolerance = 1e-6`` and served in half precision. Servers and clients run in processes of their own.

    python benchmarks/gpu_bodies.py --make         # writes the files: no GPU is needed, some minutes on few cores
    python benchmarks/gpu_bodies.py [--only answers]
    python benchmarks/gpu_bodies.py --architecture tiny-encoder --device cuda:twin --seconds 1 --results tiny.json

Rows: ``answers``: the difference of answers to mixed requests from those of each model's own file on the CPU;
``memory``: device memory of the body, and of one of the models served by itself; ``together/TOKENS`` and ``in
turn/TOKENS``: requests of all models at once, and one after another; ``alone/TOKENS``: requests of the model that is
served by itself; ``coming`` and ``going``: a model is added or removed while all others get requests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gpu_asking
import numpy as np
from gpu_asking import FOLDER, Rows, Running, clients, connected, end_when_told, exchanged, tensor_in

RESULTS = Path(__file__).parent / "results" / "gpu_bodies.json"
TASKS, WORDS = 8, 50
RANKS = {"base-encoder": 16, "encoder": 16, "tiny-encoder": 2}
BODIES = {"body": range(TASKS), "coming": range(TASKS + 1), "going": [*range(2), *range(3, TASKS + 1)]}
"""Models of each file: the first, one with one more, and one without the third of these."""


# Files


def _written(architecture: str, folder: Path, task: int) -> None:
    from weft_stitch.making.encoders import EncoderRecipe
    from weft_stitch.onnx_writer import write_onnx

    write_onnx(
        EncoderRecipe(architecture, TASKS + 1, rank=RANKS[architecture]).graph(task),
        folder / f"{architecture}-{task}.onnx",
    )


def _stitched(architecture: str, folder: Path, name: str) -> None:
    from weft_stitch.bodies.body_stitching import stitch_body

    files = [folder / f"{architecture}-{task}.onnx" for task in BODIES[name]]
    made = stitch_body(files, tolerance=1e-6, check=False, measure=False, threads=2)
    made.to_onnx(folder / f"{name}.making")
    (folder / f"{name}.making").rename(folder / f"{name}.onnx")


def make(architecture: str, folder: Path) -> None:
    """Have all files that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        for work, names in ((_written, [f"{architecture}-{task}" for task in range(TASKS + 1)]), (_stitched, BODIES)):
            keys = range(TASKS + 1) if work is _written else list(BODIES)
            missing = [key for key, name in zip(keys, names, strict=True) if not (folder / f"{name}.onnx").exists()]
            for future in [pool.submit(work, architecture, folder, key) for key in missing]:  # type: ignore[arg-type]
                future.result()
            print(f"{work.__name__[1:]}: {len(missing)}", flush=True)


# Requests


def sentence(length: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    tokens = np.random.default_rng([length, seed]).integers(0, WORDS, (1, length))
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}


def request_for(name: str, length: int, seed: int = 0) -> bytes:
    arrays = sentence(length, seed)
    inputs = [
        {"name": key, "shape": array.shape, "datatype": "INT64", "parameters": {"binary_data_size": array.nbytes}}
        for key, array in arrays.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = text + b"".join(array.tobytes() for array in arrays.values())
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + body


def request_json(port: int, path: str, method: str = "GET") -> Any:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    status, body = exchanged(connected(port), head.encode())
    if status != 200:
        raise RuntimeError(f"{path}: {status} {body[:300]!r}")
    return json.loads(body or b"{}")


def own_answer(path: Path, feed: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    import onnxruntime as ort

    (found,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)
    return np.asarray(found)


# Servers and rows


class Server(Running):
    """weft's server over one file."""

    def __init__(self, source: Path, name: str, device: str, settings: str = "") -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="bodies-", dir=FOLDER))
        shutil.copyfile(source, self.folder / f"{name}.onnx")
        (self.folder / f"{name}.toml").write_text(settings)
        super().__init__([gpu_asking.__file__, str(self.folder), "--device", device])

    def take(self, source: Path) -> None:
        """Another file in the place of its own."""
        shutil.copyfile(source, self.folder / "next")
        (self.folder / "next").rename(self.folder / "body.onnx")

    @property
    def memory_bytes(self) -> int:
        return sum(model["memory_bytes"] for model in request_json(self.port, "/weft/state")["models"])

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)


class Bench:
    """What is measured of one architecture."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._folder = given, given.folder
        self.names = [f"{given.architecture}-{task}" for task in range(TASKS + 1)]

    def answers(self, server: Server) -> dict[str, Any]:
        """Three requests of other lengths for each model, all at once, some times over."""
        lengths = [5, 16, 24, 37, 48, 64, 100, 128] if self._given.architecture != "tiny-encoder" else [5, 16, 37, 64]
        asked = [(name, lengths[(3 * at + turn) % len(lengths)]) for turn in range(3)
                 for at, name in enumerate(self.names[:TASKS])]  # fmt: skip
        with ThreadPoolExecutor(len(asked)) as pool:
            for _ in range(3):
                results = list(pool.map(lambda each: exchanged(connected(server.port), request_for(*each)), asked))
        assert all(status == 200 for status, _ in results), results[0]
        wanted = [own_answer(self._folder / f"{name}.onnx", sentence(length)) for name, length in asked]
        got = [np.frombuffer(tensor_in(body), np.float32) for _, body in results]
        off = [float(np.abs(g - w[0]).max() / np.abs(w).max()) for g, w in zip(got, wanted, strict=True)]
        return {"requests": len(off), "largest_difference": max(off), "median_difference": float(np.median(off))}

    def together(self, length: int) -> Callable[[Server], dict[str, Any]]:
        def run(server: Server) -> dict[str, Any]:
            return _summed(self._asking(server, self.names[:TASKS], length, self._given.seconds), self._given.seconds)

        return run

    def _asking(self, server: Server, names: Sequence[str], length: int, seconds: float) -> list[dict[str, Any]]:
        """A client for each model."""
        waiting = [clients(1, server.port, request_for(name, length), seconds) for name in names]
        return [finish() for finish in waiting]

    def in_turn(self, length: int, names: Sequence[str] | None = None) -> Callable[[Server], dict[str, Any]]:
        def run(server: Server) -> dict[str, Any]:
            requests = [request_for(name, length) for name in names or self.names[:TASKS]]
            connection, times_ms = connected(server.port), list[float]()
            end_s = time.perf_counter() + self._given.seconds
            while time.perf_counter() < end_s:
                for request in requests:
                    began_s = time.perf_counter()
                    assert exchanged(connection, request)[0] == 200
                    times_ms.append(1e3 * (time.perf_counter() - began_s))
            return {"per_s": len(times_ms) / self._given.seconds, "p50_ms": float(np.median(times_ms))}

        return run

    def changed(self, server: Server, name: str, by: str) -> dict[str, Any]:
        """Others are asked while one comes or goes."""
        others = [name for name in self.names[:TASKS] if name != self.names[2]]
        quiet = _summed(self._asking(server, others, 16, self._given.seconds), self._given.seconds)
        seconds = max(4.0, 4 * self._given.seconds)
        waiting = [clients(1, server.port, request_for(other, 16), seconds) for other in others]
        time.sleep(0.5)
        server.take(self._folder / f"{name}.onnx")
        began_s = time.perf_counter()
        request_json(server.port, f"/v2/repository/models/{by}/load", "POST")
        took_s = time.perf_counter() - began_s
        busy = _summed([finish() for finish in waiting], seconds)
        status, body = exchanged(connected(server.port), request_for(by, 24))
        wanted = own_answer(self._folder / f"{by}.onnx", sentence(24))
        off = float(np.abs(np.frombuffer(tensor_in(body), np.float32) - wanted[0]).max() / np.abs(wanted).max())
        gone = exchanged(connected(server.port), request_for(self.names[2], 16))[0]
        return {"took_s": took_s, "before": quiet, "while": busy, "status": status, "off": off,
                "status_of_the_third": gone, "memory_bytes": server.memory_bytes}  # fmt: skip


def _summed(found: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    return {
        "requests": sum(result["requests"] for result in found), "failed": sum(result["failed"] for result in found),
        "per_s": sum(result["requests"] for result in found) / seconds,
        "p50_ms": float(np.median([result["p50_ms"] for result in found])),
        "p99_ms": max(result["p99_ms"] for result in found),
    }  # fmt: skip


def measure(given: argparse.Namespace) -> None:
    rows, bench, names = Rows(given.results, given.only, given.device), Bench(given), BODIES
    lengths = given.tokens
    shapes = "".join(f"{name} = [1, {lengths[0]}]\n" for name in sentence(1))
    new, kept = f"{given.architecture}-{TASKS}", f"{given.architecture}-0"
    rows.measure_on(
        lambda: Server(given.folder / f"{next(iter(names))}.onnx", "body", given.device),
        {
            "answers": bench.answers,
            "memory/body": lambda server: {"bytes": server.memory_bytes},
            **{f"together/{length}": bench.together(length) for length in lengths},
            **{f"in turn/{length}": bench.in_turn(length) for length in lengths},
            "coming": lambda server: bench.changed(server, "coming", new),
            "going": lambda server: bench.changed(server, "going", kept),
        },
    )
    rows.measure_on(
        lambda: Server(given.folder / f"{kept}.onnx", kept, given.device, f"max_batch = {TASKS}\n[shapes]\n{shapes}"),
        {
            "memory/one model": lambda server: {"bytes": server.memory_bytes},
            f"alone/{lengths[0]}": bench.in_turn(lengths[0], [kept]),
        },
    )


def main() -> None:
    end_when_told()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="base-encoder")
    parser.add_argument("--folder", type=Path, default=FOLDER / "encoders")
    parser.add_argument("--make", action="store_true", help="only make the files")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    make(arguments.architecture, arguments.folder)
    if not arguments.make:
        measure(arguments)


if __name__ == "__main__":
    main()
