"""Runs the models of a body, alone and joined, in ONNX Runtime: ``BodyBench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.timing import Run, clock_for, least_seconds
from weft_stitch.bodies.body import Body, BodyValue
from weft_stitch.bodies.joining import model_graph, port_name, value_name
from weft_stitch.bodies.probing import MORE, SMALL, BodyPlace, BodySamples, Feed, locate_outputs
from weft_stitch.graph import Graph
from weft_stitch.net import Array
from weft_stitch.onnx_writer import write_onnx
from weft_stitch.running.sessions import Difference, load_session, relative_difference, run_session

MOST_RACED = 8
"""Models that are loaded at once for timing, which bounds memory; all others are assumed to be as fast."""

Alone = Callable[[Feed], list[Array]]
"""A loaded model: inputs -> outputs, in order."""


class BodyBench:
    """Sessions of the models' files; one model is loaded at a time, since a body may be made of dozens."""

    def __init__(self, body: Body, files: Sequence[Path], threads: int) -> None:
        self._body, self._files, self._threads = body, files, threads
        self._held: tuple[int, Alone] | None = None

    def alone(self, task: int, feed: Feed) -> dict[str, Array]:
        """Run one model alone: its own file, or its adapter on the base's weights."""
        if self._held is None or self._held[0] != task:
            self._held = None
            self._held = task, self._opened(task, optimise=False)
        return dict(zip(self._body.outputs[task], self._held[1](feed), strict=True))

    def values(self, samples: BodySamples) -> Callable[[int, int, int], dict[BodyValue, Array]]:
        """Return a function that runs a model and gives out all its intermediate values."""

        def run(task: int, rows: int, length: int) -> dict[BodyValue, Array]:
            wanted = self._body.values(task)
            graph = model_graph(self._body, task, wanted)
            session = self._session(graph, optimise=False)
            drawn = samples.draw(np.random.default_rng(0), task, MORE[0], length)
            feed = self._named(task, {name: array[:rows] for name, array in drawn.items()})
            try:
                arrays = run_session(session, [value_name(value) for value in wanted], feed, graph.name)
            except StitchError as error:
                raise StitchError(f"{error} (with {rows} rows; export it so that it takes any number)") from error
            return dict(zip(wanted, arrays, strict=True))

        return run

    def outputs(self, samples: BodySamples) -> dict[str, BodyPlace]:
        """Find the axes of rows and lengths in the outputs of every model, by the graph's names."""

        def run(task: int, rows: int, length: int) -> dict[str, Array]:
            return self.alone(task, samples.draw(np.random.default_rng(0), task, rows, length))

        return {
            port_name(self._body, task, name): place
            for task in range(self._body.tasks)
            for name, place in locate_outputs(self._body, task, run).items()
        }

    def difference(self, graph: Graph, samples: BodySamples) -> Difference:
        """The largest difference to the models alone, over batches of mixed row counts and lengths."""
        session, tasks = self._session(graph, optimise=True), range(self._body.tasks)
        names = [output.name for output in graph.outputs]
        fed, results = [], []
        for seed, lengths in enumerate(_lengths(samples, len(tasks))):
            rng = np.random.default_rng(seed)
            fed.append([samples.draw(rng, task, 1 + (task + seed) % 3, lengths[task]) for task in tasks])
            outputs = run_session(session, names, self._joined(fed[-1]), graph.name)
            results.append(dict(zip(names, outputs, strict=True)))
        worst = Difference(0.0, "")
        for task in tasks:
            for feeds, together in zip(fed, results, strict=True):
                for port, wanted in self.alone(task, feeds[task]).items():
                    name = port_name(self._body, task, port)
                    worst = max(worst, Difference(relative_difference(together[name], wanted), name))
        return worst

    def unchanged(self, task: int, samples: BodySamples, close: Callable[[Array, Array], bool]) -> bool:
        """Whether a model computed from the body's weights answers as its own file does."""
        feed = samples.draw(np.random.default_rng(0), task, *SMALL)
        session = self._session(model_graph(self._body, task), optimise=False)
        outputs = run_session(session, self._ours(task), self._named(task, feed), self._body.names[task])
        wanted = self.alone(task, feed).values()
        pairs = zip(outputs, wanted, strict=True)
        return all(mine.shape == right.shape and close(mine, right) for mine, right in pairs)

    def times_s(self, graph: Graph, samples: BodySamples, length: int) -> dict[str, float]:
        """Time a row of each model: one model after another, and all as one body, in turns."""
        rng = np.random.default_rng(0)
        feeds = [samples.draw(rng, task, 1, length) for task in range(self._body.tasks)]
        raced = [self._opened(task, optimise=True) for task in range(min(MOST_RACED, len(feeds)))]
        whole = self._session(graph, optimise=True)
        contenders: dict[str, list[Run]] = {
            "sequential": [partial(model, feed) for model, feed in zip(raced, feeds, strict=False)],
            "stitched": [partial(whole.run, None, self._joined(feeds))],
        }
        seconds = least_seconds(contenders, clock=clock_for(self._threads))
        return seconds | {"sequential": seconds["sequential"] * len(feeds) / len(raced)}

    def _opened(self, task: int, *, optimise: bool) -> Alone:
        names, called = list(self._body.outputs[task]), self._body.names[task]
        if not self._files[task].is_dir():
            session = load_session(self._files[task], self._threads, self._files[task].name, optimise=optimise)
            return lambda feed: run_session(session, names, feed, called)
        whole, ours = self._session(model_graph(self._body, task), optimise=optimise), self._ours(task)
        return lambda feed: run_session(whole, ours, self._named(task, feed), called)

    def _session(self, graph: Graph, *, optimise: bool) -> Any:
        """Open a session over a graph of any size, by a temporary file (protobuf in memory ends at 2 GB)."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "body.onnx"
            write_onnx(graph, path)
            return load_session(path, self._threads, graph.name, optimise=optimise)

    def _ours(self, task: int) -> list[str]:
        """The graph's names of a model's outputs."""
        return [port_name(self._body, task, name) for name in self._body.outputs[task]]

    def _joined(self, feeds: Sequence[Feed]) -> Feed:
        return {name: array for task, feed in enumerate(feeds) for name, array in self._named(task, feed).items()}

    def _named(self, task: int, feed: Feed) -> Feed:
        return {port_name(self._body, task, name): array for name, array in feed.items()}


def _lengths(samples: BodySamples, tasks: int) -> list[list[int]]:
    """Sets of lengths to compare at, one length for each model."""
    if samples.fill is None:
        return [[6] * tasks, [9] * tasks]
    return [[6] * tasks, [3 + 5 * task % 7 for task in range(tasks)]]
