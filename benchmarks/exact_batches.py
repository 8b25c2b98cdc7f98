"""Can other rows of a batch change an answer? Requests over all special models, some of them with hostile values.

A real server gets waves of one-row requests for one model at a time, several models at once, over HTTP on loopback with
binary tensors. Some rows are ordinary, the others hold huge values, NaN, infinities or zeros. Every answer is compared
bit by bit with the answer of the same row in a batch of the same size whose other rows are ordinary, at any position;
ordinary float32 rows also with the answer of the row alone. Models that must not be batched are served as well: their
answers must equal those of the row alone. The models are those of the tests:

    python benchmarks/exact_batches.py

``--resume`` continues with the recorded results, policy by policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import machine

from weft.base.errors import ModelError
from weft.base.jsonfile import write_json
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.tensors import DATATYPES
from weft.serving.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.runtime.neighbours import CALM, deviation, together
from tests.runtime.special_models import MOODS, SPECIAL, Special, large

RESULTS = Path(__file__).parent / "results" / "exact_batches.json"
POLICIES = ("punctual", "fifo", "edf", "fluid")
LARGEST = 8
POOL = 16
"""Rows that are sent to a model again and again."""
WAVES = 3
"""Models that are asked at the same time."""
UNSTABLE = ("noise", "dropout-in-training", "normalised-in-training")
"""Models that ONNX Runtime answers otherwise every time, though alone: they draw lots, or keep running statistics."""
KINDS = {dtype: name for name, dtype in DATATYPES.items()}

Key = tuple[Any, ...]
"""An answer: for each output its shape and its bytes."""


class Row(NamedTuple):
    """One request that is sent again and again."""

    body: bytes
    head_bytes: int
    calm: bool
    known: dict[int, dict[Key, float]]
    """Size of a batch -> the answers in it, place by place, and how far each is from the row alone."""


@dataclass
class Exam:
    """A model, its rows, and what became of them."""

    special: Special
    rows: list[Row]
    refused: str = ""
    """Why the backend does not batch it."""
    placeless: bool = True
    """Whether answers are the same bits at every place of a batch."""
    sizes: Counter[int] = field(default_factory=Counter)
    different: int = 0
    compared: int = 0
    furthest: float = 0.0

    def settings(self) -> str:
        batches = "" if self.refused else f"max_batch = {LARGEST}\nbatch_timeout_ms = 4\n"
        shapes = [f"{name} = {list(shape)}" for name, shape in self.special.shapes.items()]
        return batches + ("\n".join(["[shapes]", *shapes]) if shapes else "")


# Rows and what they shall give


def exams(folder: Path, megabytes: int) -> Iterator[Exam]:
    specials = list(SPECIAL)
    if megabytes:
        specials.append(Special(f"large-{megabytes}mb", lambda: large(megabytes), external=True))
    for special in specials:
        path = special.save(folder)
        exam = _exam(special, path)
        path.with_suffix(".toml").write_text(exam.settings())
        yield exam


def _exam(special: Special, path: Path) -> Exam:
    refused = ""
    try:
        model = prepare(path, LoadOptions(max_batch=LARGEST, shapes=special.shapes))
    except ModelError as error:
        refused = str(error).partition(": ")[2].partition("; set rows")[0]
        model = prepare(path, LoadOptions(max_batch=1, shapes=special.shapes))
    exam = Exam(special, [], refused)
    rng = np.random.default_rng(7)
    pool = POOL if model.residency.memory_bytes < 1 << 26 else 4
    moods = [CALM[number // 2 % len(CALM)] if number % 2 else MOODS[number // 2 % len(MOODS)] for number in range(pool)]
    samples = [special.rows(model.inputs, 1, mood, rng) for mood in moods]
    others = [special.rows(model.inputs, 1, "plain", rng) for _ in range(LARGEST)]
    for mood, sample in zip(moods, samples, strict=True):
        body, head = _packed(sample)
        known = {size: _known(model, sample, others, size) for size in range(1, 2 if refused else LARGEST + 1)}
        exam.placeless &= all(len(found) == 1 for found in known.values())
        exam.rows.append(Row(body, head, mood in CALM, known))
    model.close()
    return exam


def _known(model: CpuModel, sample: dict[str, Any], others: Sequence[dict[str, Any]], size: int) -> dict[Key, float]:
    (alone,) = together(model, [sample])
    results = {}
    for place in range(size):
        batch = [*others[:place], sample, *others[place + 1 : size]]
        got = together(model, batch)[place]
        results[_key(got)] = deviation(alone, got)
    return results


def _key(answer: dict[str, Any]) -> Key:
    return tuple((name, array.shape, _bytes(array)) for name, array in sorted(answer.items()))


def _bytes(array: Any) -> bytes:
    if array.dtype != np.object_:
        return bytes(np.ascontiguousarray(array).tobytes())
    return b"".join(struct.pack("<I", len(text)) + text for text in array.ravel().tolist())


# Talking to the server


def _packed(sample: dict[str, Any]) -> tuple[bytes, int]:
    """A request with binary tensors both ways, and the length of its JSON."""
    parts = [_bytes(array) for array in sample.values()]
    inputs = [
        {"name": name, "shape": each.shape, "datatype": KINDS[each.dtype],
         "parameters": {"binary_data_size": len(part)}}
        for (name, each), part in zip(sample.items(), parts, strict=True)
    ]  # fmt: skip
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([head, *parts]), len(head)


class Connection:
    """A connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._port, self._streams = port, None

    async def infer(self, model: str, row: Row) -> tuple[Key, int]:
        """The answer to a row, and how many requests were computed with it."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        reader, writer = self._streams
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(row.body)}\r\n"
        writer.write(f"{head}Inference-Header-Content-Length: {row.head_bytes}\r\n\r\n".encode() + row.body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{model}: {lines[0]} {body[:200]!r}")
        return _unpacked(body, int(headers["inference-header-content-length"]))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def _unpacked(body: bytes, at: int) -> tuple[Key, int]:
    said, found = json.loads(body[:at]), []
    for output in said["outputs"]:
        end = at + output["parameters"]["binary_data_size"]
        found.append((output["name"], tuple(output["shape"]), body[at:end]))
        at = end
    return tuple(sorted(found)), said["parameters"]["weft_batch"]


# The run


@dataclass
class Tally:
    """What one policy came to."""

    wanted: int
    batched: int = 0
    sent: int = 0
    different: int = 0
    furthest: float = 0.0
    errors: list[str] = field(default_factory=list)


async def wave(exam: Exam, connections: Sequence[Connection], tally: Tally, rng: np.random.Generator) -> None:
    """Requests for one model, all at once."""
    count = int(rng.integers(2, len(connections) + 1))
    rows = [exam.rows[int(index)] for index in rng.integers(0, len(exam.rows), count)]
    asked = [connection.infer(exam.special.name, row) for connection, row in zip(connections, rows, strict=False)]
    for row, got in zip(rows, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        tally.sent += 1
        if isinstance(got, BaseException):
            tally.errors.append(str(got))
        else:
            _compare(exam, row, *got, tally)


def _compare(exam: Exam, row: Row, answer: Key, size: int, tally: Tally) -> None:
    exam.sizes[size] += 1
    tally.batched += size > 1
    if exam.special.name in UNSTABLE:
        return
    exam.compared += 1
    off = row.known.get(size, {}).get(answer)
    if off is None:
        exam.different += 1
        tally.different += 1
    elif row.calm:
        exam.furthest, tally.furthest = max(exam.furthest, off), max(tally.furthest, off)


async def asking(port: int, found: Sequence[Exam], tally: Tally, seed: int) -> None:
    """One of those who send waves."""
    rng = np.random.default_rng(seed)
    connections = [Connection(port) for _ in range(LARGEST + 4)]
    weights = np.array([0.02 if len(exam.rows) < POOL else 0.2 if exam.refused else 1.0 for exam in found])
    while tally.batched < tally.wanted and len(tally.errors) < 10:
        exam = found[int(rng.choice(len(found), p=weights / weights.sum()))]
        await wave(exam, connections, tally, rng)
    for connection in connections:
        connection.close()


async def send_waves(port: int, found: Sequence[Exam], tally: Tally) -> None:
    await asyncio.gather(*(asking(port, found, tally, seed) for seed in range(WAVES)))


def measured(folder: Path, found: Sequence[Exam], policy: str, wanted: int) -> dict[str, Any]:
    """Serve all models under a policy until so many requests were computed together with others."""
    tally, began_s = Tally(wanted), time.monotonic()
    cache = str(folder.with_name("cache"))
    with ServerProcess(str(folder), "--policy", policy, "--lanes", "1", "--cache", cache) as server:
        ready_s = time.monotonic()
        asyncio.run(send_waves(int(server.url.rpartition(":")[2].strip("/")), found, tally))
    if tally.errors:
        raise SystemExit("\n".join(tally.errors[:5]))
    return {
        "policy": policy, "requests": tally.sent, "batched": tally.batched, "different": tally.different,
        "furthest": tally.furthest, "load_s": ready_s - began_s, "seconds": time.monotonic() - ready_s,
    }  # fmt: skip


def _row(exam: Exam) -> dict[str, Any]:
    return {
        "model": exam.special.name, "batched": not exam.refused, "reason": exam.refused,
        "stable": exam.special.name not in UNSTABLE,
        "compared": exam.compared,
        "different": exam.different, "furthest": exam.furthest, "same_at_every_place": exam.placeless,
        "sizes": {str(size): exam.sizes[size] for size in sorted(exam.sizes)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="computed together with others, in all")
    parser.add_argument("--megabytes", type=int, default=500, help="of the largest model; 0: none")
    parser.add_argument("--resume", action="store_true", help="go on with what was recorded")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    done: dict[str, Any] = (
        json.loads(arguments.output.read_text()) if arguments.resume and arguments.output.exists() else {}
    )
    runs, models = done.get("runs", []), done.get("models", [])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models"
        folder.mkdir()
        results = list(exams(folder, arguments.megabytes))
        print(f"{len(results)} models, {sum(not exam.refused for exam in results)} of them batched", flush=True)
        for policy in POLICIES:
            if any(run["policy"] == policy for run in runs):
                continue
            runs.append(measured(folder, results, policy, -(-arguments.requests // len(POLICIES))))
            print(runs[-1], flush=True)
            rows = _added(models, [_row(exam) for exam in results])
            content = {"format": 1, "machine": machine("onnxruntime", "onnx"), "megabytes": arguments.megabytes}
            write_json(arguments.output, {**content, "runs": runs, "models": rows})
    print(f"{sum(run['batched'] for run in runs)} batched, {sum(run['different'] for run in runs)} different")


def _added(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts of an earlier part and of this one."""
    old = {row["model"]: row for row in before}
    for row in now:
        if row["model"] in old:
            was = old[row["model"]]
            row["compared"], row["different"] = (
                row["compared"] + was["compared"],
                row["different"] + was["different"],
            )
            row["furthest"] = max(row["furthest"], was["furthest"])
            sizes = Counter({int(k): v for k, v in row["sizes"].items()}) + Counter(
                {int(k): v for k, v in was["sizes"].items()}
            )
            row["sizes"] = {str(size): sizes[size] for size in sorted(sizes)}
    return list(now)


if __name__ == "__main__":
    main()
