"""Where requests leave: the keys of a workload, records of a real network, and the draws from both."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.base.errors import WorkloadError
from weft.devices import load_device
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.exits import ExitRecord, from_rates, read_record
from weft.workloads.requests import Workload, parse_workload, read_workload

STREAM = {"model": "resnet50", "deadline_ms": 400, "rate": 15}
PAPER = (0.051, 0.169, 0.09, 0.69)


def workload(folder: str = ".", **keys: object) -> Workload:
    return parse_workload({"stream": [STREAM | keys], "folder": folder}, "w.toml")


def refused(**keys: object) -> str:
    with pytest.raises(WorkloadError) as caught:
        workload(**keys)
    assert "\n" not in str(caught.value)
    assert "more problems" not in str(caught.value)
    return str(caught.value)


def record() -> ExitRecord:
    """Four samples at two early exits and the end."""
    confidence = np.array([[0.9, 0.9, 0.9], [0.5, 0.8, 0.9], [0.5, 0.6, 0.3], [0.8, 0.1, 0.1]])
    correct = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 1, 1]], bool)
    return ExitRecord(confidence, correct)


def saved(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> str:
    saved(tmp_path / "r.npz", confidence=record().confidence, correct=record().correct)
    return str(tmp_path)


class TestKeys:
    def test_a_file_says_where_its_samples_leave(self, tmp_path):
        path = tmp_path / "w.toml"
        path.write_text(
            '[[stream]]\nmodel = "resnet50"\ndeadline_ms = 400\nrate = 15\nexits = 3\n'
            "exit_rates = [0.051, 0.169, 0.09, 0.69]\nexit_head = 'conv'\n"
        )
        (stream,) = read_workload(path).stream
        assert (stream.exits, stream.exit_head, stream.exit_rates) == (3, "conv", PAPER)
        assert (stream.early_exits, stream.leaves, stream.exit_threshold) == (3, True, 0.8)
        assert hash(stream) == hash(read_workload(path).stream[0])

    def test_names_of_outputs_end_with_the_end(self):
        (stream,) = workload(exits=["a", "b", "end"], exit_rates=[0.2, 0.3, 0.5]).stream
        assert (stream.exits, stream.early_exits) == (("a", "b", "end"), 2)

    def test_rates_alone_are_for_a_file_that_marks_its_exits(self):
        (stream,) = workload(exit_rates=[0.5, 0.5]).stream
        assert (stream.exits, stream.early_exits, stream.leaves) == (None, 0, True)

    def test_a_stream_without_exits_says_nothing(self):
        load = workload()
        assert (load.stream[0].leaves, load.exit_rates(0), load.exit_rates(0, 0), load.record(0)) == (
            False,
            (),
            (),
            None,
        )

    @pytest.mark.parametrize(
        ("keys", "says"),
        [
            ({"exits": 3}, "exits = 3 needs exit_rates (a share for each exit, the end last) or exit_record"),
            ({"exits": 3, "exit_rates": [0.1, 0.2, 0.3, 0.3]}, "exit_rates = [0.1, 0.2, 0.3, 0.3] sum to 0.9"),
            ({"exits": 1, "exit_rates": [0.5, 0.500002]}, "must sum to 1"),
            ({"exits": 3, "exit_rates": [0.5, 0.5]}, "exit_rates is for 2 exits, must be for 4: 3 early and the end"),
            ({"exits": ["a", "b"], "exit_rates": [0.2, 0.3, 0.5]}, "is for 3 exits, must be for 2"),
            ({"exits": 1, "exit_rates": [1.5, -0.5]}, "each must be 0 to 1"),
            ({"exits": 1, "exit_rates": [0.5, float("nan")]}, "each must be 0 to 1"),
            ({"exits": 1, "exit_rates": [0.5, float("inf")]}, "each must be 0 to 1"),
            ({"exits": 1, "exit_rates": ["half", 0.5]}, "stream.0.exit_rates.0 = 'half'"),
            ({"exits": 1, "exit_rates": [0.5, 0.5], "exit_record": "r.npz"}, "keep one of them"),
            ({"exits": 0, "exit_rates": [1.0]}, "stream.0.exits = 0"),
            ({"exits": -3, "exit_rates": [1.0]}, "must be 1 to 256 early exits"),
            ({"exits": True, "exit_rates": [0.5, 0.5]}, "must be a number of exits, or a list of names"),
            ({"exits": 2.5, "exit_rates": [0.5, 0.5]}, "must be a number of exits, or a list of names"),
            ({"exits": "a,b", "exit_rates": [0.5, 0.5]}, "must be a number of exits, or a list of names"),
            ({"exits": ["a", 2], "exit_rates": [0.5, 0.5]}, "must be a number of exits, or a list of names"),
            ({"exits": ["end"], "exit_rates": [1.0]}, "must name at least two outputs"),
            ({"profiles": ["p.json"], "max_batch": 1, "exit_rates": [1.0]}, "profiles say nothing of a model's exits"),
            ({"exit_head": "mlp"}, "stream.0.exit_head = 'mlp'"),
            ({"exit_threshold": 1.5}, "stream.0.exit_threshold = 1.5"),
            ({"exit_threshold": float("nan")}, "stream.0.exit_threshold = nan"),
            ({"exit_record": ""}, "stream.0.exit_record = ''"),
            ({"exits": 1, "exit_rates": [0.5, 0.5], "exit_floor": 0.5}, "exit_floor = 0.5 needs exit_record"),
            (
                {"exits": 1, "exit_record": "r.npz", "exit_floor": 0.9},
                "exit_floor = 0.9 must be at most exit_threshold = 0.8",
            ),
            ({"max_batch": 0}, "stream.0.max_batch = 0: Input should be greater than or equal to 1"),
            ({"exit_rate": [1.0]}, "did you mean 'exit_rates'?"),
        ],
    )
    def test_what_makes_no_sense_is_one_line(self, keys, says):
        assert says in refused(**keys)

    def test_a_workload_has_streams(self):
        with pytest.raises(WorkloadError, match="a workload has 1 to 100000 streams, this one 0"):
            parse_workload({"stream": []}, "w.toml")

    def test_one_device_has_not_too_many_of_them(self):
        with pytest.raises(WorkloadError, match="65 streams, and one device has at most 64"):
            prepare(parse_workload({"stream": [STREAM] * 65}, "w.toml"))

    def test_shares_must_fit_the_exits_of_the_model(self):
        load = workload(exit_rates=[0.5, 0.5])
        assert load.exit_rates(0, 1) == (0.5, 0.5)
        with pytest.raises(WorkloadError, match=r"stream 0 \(resnet50\): exit_rates is for 2 exits, must be for 4"):
            load.exit_rates(0, 3)
        with pytest.raises(WorkloadError, match="but the model has none; place some with exits = 1"):
            load.exit_rates(0, 0)
        with pytest.raises(WorkloadError, match="its model has 2 early exits; say who leaves there with exit_rates"):
            workload().exit_rates(0, 2)


class TestRecords:
    def test_a_sample_leaves_at_the_first_confident_exit_and_the_end_takes_all(self):
        assert record().exits_taken(0.8).tolist() == [0, 1, 2, 0]
        assert record().rates(0.8) == (0.5, 0.25, 0.25)
        assert record().accuracy(0.8) == 3 / 4  # the last sample is sure and wrong

    def test_a_threshold_of_nothing_lets_everyone_leave_at_once_and_of_one_hardly_anyone(self):
        assert record().rates(0.0) == (1, 0, 0)
        assert record().rates(1.0) == (0, 0, 1)
        assert (record().accuracy(0.0), record().accuracy(1.0)) == (0.25, 1.0)

    def test_asking_does_not_change_the_record(self):
        asked = record()
        asked.exits_taken(0.8)
        assert np.array_equal(asked.confidence, record().confidence)

    def test_the_rates_of_a_stream_are_those_of_its_record(self, folder):
        load = workload(folder, exits=2, exit_record="r.npz", exit_threshold=0.9)
        assert load.exit_rates(0, 2) == (0.25, 0, 0.75)
        found = load.record(0)
        assert found is not None and (found.samples, found.exits) == (4, 3)

    def test_a_record_of_another_network_is_refused(self, folder):
        load = workload(folder, exits=3, exit_record="r.npz")
        for call in (load.record, load.exits_taken, load.exit_rates):
            with pytest.raises(WorkloadError, match=r"exit_record = 'r.npz' is for 3 exits, must be for 4: 3 early"):
                call(0)
        with pytest.raises(WorkloadError, match=r"exit_record = 'r.npz' is for 3 exits, but the model has none"):
            workload(folder, exit_record="r.npz").exit_rates(0, 0)

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_all_floating_types_are_read(self, tmp_path, dtype, save):
        save(
            tmp_path / "r.npz",
            confidence=np.asfortranarray(record().confidence.astype(dtype)),
            correct=record().correct,
        )
        read = read_record(tmp_path / "r.npz")
        assert read.confidence.dtype == np.float64
        assert read.confidence == pytest.approx(record().confidence, abs=1e-3)

    GOOD, RIGHT = record().confidence, record().correct

    @pytest.mark.parametrize(
        ("arrays", "says"),
        [
            ({}, "this file holds nothing"),
            ({"confidence": GOOD}, "has the arrays 'confidence' and 'correct'; this file holds confidence"),
            ({"confidence": GOOD.astype(int), "correct": RIGHT}, "confidence is of type int64, must be floating point"),
            ({"confidence": GOOD, "correct": RIGHT.astype(int)}, "correct is of type int64, must be boolean"),
            ({"confidence": GOOD[0], "correct": RIGHT[0]}, "confidence has the shape 3, must be samples x exits"),
            ({"confidence": GOOD[:, :1], "correct": RIGHT[:, :1]}, "confidence has the shape 4x1"),
            ({"confidence": GOOD[:0], "correct": RIGHT[:0]}, "confidence has the shape 0x3"),
            ({"confidence": np.float64(1), "correct": RIGHT}, "confidence has the shape scalar"),
            ({"confidence": GOOD, "correct": RIGHT[1:]}, "correct is 3x3, must be 4x3 as confidence is"),
            ({"confidence": GOOD * np.nan, "correct": RIGHT}, "confidence of sample 0 at exit 0 is nan"),
            ({"confidence": GOOD + 0.2, "correct": RIGHT}, "sample 0 at exit 0 is 1.1, must be 0 to 1"),
            ({"confidence": GOOD - 0.2, "correct": RIGHT}, "sample 3 at exit 1 is -0.1, must be 0 to 1"),
            ({"confidence": np.array([[None, 1]]), "correct": RIGHT}, "confidence has the shape 1x2 of object"),
        ],
    )
    def test_a_bad_record_is_one_line(self, tmp_path, arrays, says):
        with pytest.raises(WorkloadError) as caught:
            read_record(saved(tmp_path / "r.npz", **arrays))
        assert says in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path / "r.npz: ")) and "\n" not in str(caught.value)

    def test_what_is_no_file_is_one_line(self, tmp_path):
        (tmp_path / "text.npz").write_text("confidence")
        np.save(tmp_path / "one.npy", self.GOOD)
        for name, says in (("none.npz", "No such file"), (".", "Is a directory"), ("text.npz", "numpy.savez"),
                           ("one.npy", "not a zip file")):  # fmt: skip
            with pytest.raises(WorkloadError, match=says):
                read_record(tmp_path / name)

    @pytest.mark.parametrize("rows", [10**7, 10**18])
    def test_a_header_that_promises_more_than_the_file_holds_takes_no_memory(self, tmp_path, rows):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (rows, 3)})
        with zipfile.ZipFile(tmp_path / "r.npz", "w") as archive:
            archive.writestr("confidence.npy", header.getvalue() + b"\0" * 64)
            archive.writestr("correct.npy", header.getvalue())
        with pytest.raises(
            WorkloadError, match=rf"confidence has the shape {rows}x3 of float64, which is not in the file"
        ):
            read_record(tmp_path / "r.npz")

    def test_an_unknown_version_of_the_format_is_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "r.npz", "w") as archive:
            archive.writestr("confidence.npy", b"\x93NUMPY\x03\x00" + b"\0" * 64)
            archive.writestr("correct.npy", b"")
        with pytest.raises(WorkloadError, match="unknown version of numpy's format"):
            read_record(tmp_path / "r.npz")

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_damaged_bytes_are_a_record_or_one_line(self, tmp_path, data):
        content = io.BytesIO()
        save = data.draw(st.sampled_from([np.savez, np.savez_compressed]))
        save(content, confidence=self.GOOD, correct=self.RIGHT)
        damaged = bytearray(content.getvalue())
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path / "r.npz"
        path.write_bytes(damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) // 2]))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's about what it could still read
            try:
                assert read_record(path).exits >= 2
            except WorkloadError as error:
                assert "\n" not in str(error) and str(path) in str(error)

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=200))
    def test_a_damaged_header_is_one_line(self, tmp_path, header):
        path = tmp_path / "r.npz"
        with zipfile.ZipFile(path, "w") as archive:
            size = len(header).to_bytes(2, "little")
            archive.writestr("confidence.npy", b"\x93NUMPY\x01\x00" + size + header)
            archive.writestr("correct.npy", b"")
        with warnings.catch_warnings(), pytest.raises(WorkloadError) as caught:
            warnings.simplefilter("ignore")
            read_record(path)
        assert "\n" not in str(caught.value)


def drawn(load: Workload, count: int, index: int = 0, seed: int | None = None) -> np.ndarray:
    blocks = []
    for block in load.exits_taken(index, seed):
        blocks.append(block)
        if sum(map(len, blocks)) >= count:
            return np.concatenate(blocks)[:count]
    raise AssertionError("fates never end")


class TestFates:
    def test_exits_are_drawn_as_often_as_the_rates_say(self):
        fates = drawn(workload(exits=3, exit_rates=PAPER), 200_000)
        assert fates.dtype == np.int64
        found = np.bincount(fates, minlength=4) / len(fates)
        deviation = np.sqrt(np.array(PAPER) * (1 - np.array(PAPER)) / len(fates))
        assert (abs(found - PAPER) < 4 * deviation).all()

    @settings(max_examples=25)
    @given(st.lists(st.integers(0, 5), min_size=2, max_size=8).filter(any))
    def test_nobody_leaves_where_the_rate_is_nothing(self, parts):
        rates = [part / sum(parts) for part in parts]
        fates = drawn(workload(exit_rates=rates), 10_000)
        assert {rates[exit] > 0 for exit in np.unique(fates)} == {True}

    def test_what_rounding_leaves_over_is_the_ends(self):
        fates = next(from_rates((0.5, 0.25), np.random.default_rng(0))).exits
        assert set(fates.tolist()) == {0, 1}

    def test_the_same_seed_draws_the_same_and_streams_differ(self):
        keys = {"exits": 3, "exit_rates": PAPER}
        load = parse_workload({"stream": [STREAM | keys, STREAM | keys], "seed": 5}, "w")
        assert np.array_equal(drawn(load, 9000), drawn(load, 9000))
        assert np.array_equal(drawn(load, 9000), drawn(load, 9000, seed=5))
        assert not np.array_equal(drawn(load, 9000), drawn(load, 9000, index=1))
        assert not np.array_equal(drawn(load, 9000), drawn(load, 9000, seed=6))

    def test_exits_and_arrivals_are_drawn_apart(self):
        plain, leaving = workload(), workload(exits=3, exit_rates=PAPER)
        fates = leaving.exits_taken(0)
        assert np.array_equal(
            next(leaving.exits_taken(0)), next(from_rates(PAPER, np.random.default_rng([0, 0, 1]))).exits
        )
        for one, other in zip(plain.arrivals(0), leaving.arrivals(0), strict=True):
            next(fates)
            assert np.array_equal(one, other)

    def test_samples_of_a_record_leave_as_its_rule_says(self, folder):
        load = workload(folder, exits=2, exit_record="r.npz")
        (fates,), (rows,) = islice(load.exits_taken(0), 1), islice(load.record_rows(0), 1)
        assert np.array_equal(record().exits_taken(0.8)[rows], fates)
        assert set(rows.tolist()) == {0, 1, 2, 3}

    def test_a_higher_threshold_keeps_every_sample_at_least_as_long(self, folder):
        low, high = (drawn(workload(folder, exits=2, exit_record="r.npz", exit_threshold=t), 4096) for t in (0.5, 0.85))
        assert (low <= high).all() and (low < high).any()

    def test_rates_have_no_rows(self):
        (rows,) = islice(workload(exits=3, exit_rates=PAPER).record_rows(0), 1)
        assert set(rows.tolist()) == {-1}

    def test_without_rates_nobody_can_say_where_samples_leave(self):
        with pytest.raises(WorkloadError, match=r"stream 0 \(resnet50\): nothing says where its samples leave"):
            workload().exits_taken(0)


class TestSteering:
    """A threshold that sinks while requests press, as in a server."""

    def left(self, folder: str, rate: float, **keys: object) -> Counter[int]:
        """How many requests left after so many layers."""
        stream = STREAM | {"rate": rate, "exits": 2, "exit_record": "r.npz", "exit_threshold": 0.9} | keys
        load = parse_workload({"stream": [stream], "folder": folder, "duration_s": 8, "warmup_s": 0}, "w.toml")
        run = simulate_requests(prepare(load, load_device("zc706-resnet50")), "fifo", record=True, late="keep")
        return Counter(answer.layers for answer in run.tally.answers)

    def test_without_a_floor_requests_leave_where_the_record_says(self, folder):
        assert self.left(folder, 10, exit_floor=0.9) == self.left(folder, 10)

    def test_a_calm_model_keeps_its_threshold(self, folder):
        assert self.left(folder, 2, exit_floor=0.5) == self.left(folder, 2)

    def test_under_pressure_more_leave_early(self, folder):
        stays, sinks = self.left(folder, 60), self.left(folder, 60, exit_floor=0.5)
        assert sum(stays.values()) == sum(sinks.values())
        assert sinks[min(stays)] > 1.5 * stays[min(stays)]
