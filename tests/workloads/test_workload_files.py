"""Workload files: what a good one says, and one line for everything that is wrong with a bad one."""

from __future__ import annotations

import pytest

from tests.engine.naive import profile, small_npu
from weft.base.errors import ProfileError, WorkloadError
from weft.devices.costs.layer_costs import write_profile
from weft.simulation.requests import prepare
from weft.workloads.requests import parse_workload, read_workload

GOOD = """\
device = "weaver-plus"
total_rate = 650
ratio = [64, 1]
duration_s = 5
warmup_s = 1
seed = 7

[[stream]]
model = "resnet50"
arrival = "bursty"
deadline_ms = 15
max_batch = 8
batch_timeout_ms = 1.5
priority = 9

[[stream]]
model = "bert-base"
arrival = "poisson"
deadline_ms = 130
seq_len = 32
"""
STREAM = '[[stream]]\nmodel = "resnet50"\ndeadline_ms = 15\n'


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "w.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_good_file_of_twenty_lines_says_what_it_says(written, tmp_path):
    load = read_workload(written(GOOD))
    assert len(GOOD.splitlines()) == 20
    assert (load.device, load.duration_s, load.warmup_s, load.seed) == ("weaver-plus", 5, 1, 7)
    assert load.folder == str(tmp_path)
    vision, language = load.stream
    assert (vision.model, vision.arrival, vision.deadline_ms, vision.priority) == ("resnet50", "bursty", 15, 9)
    assert (vision.max_batch, vision.batch_timeout_ms) == (8, 1.5)
    assert (language.seq_len, language.max_batch, language.priority, language.batch_timeout_ms) == (32, 16, 1, 2)


def test_a_total_rate_is_divided_by_the_ratio(written):
    assert read_workload(written(GOOD)).rates == pytest.approx((640, 10))
    equal = read_workload(written("total_rate = 90\n" + 3 * STREAM))
    assert equal.rates == pytest.approx((30, 30, 30))


def test_rates_of_the_streams_stand_where_there_is_no_total_rate(written):
    load = read_workload(written(STREAM + "rate = 5\n" + STREAM + 'arrival = "closed"\nclients = 3\n'))
    assert load.rates == (5, None)


def test_scaling_multiplies_every_rate_and_leaves_the_rest(written):
    load = read_workload(written(GOOD))
    twice = load.scaled(2.5)
    assert twice.rates == pytest.approx((1600, 25))
    assert twice.model_copy(update={"total_rate": 650.0, "stream": load.stream}) == load
    own = read_workload(written(STREAM + "rate = 4\n" + STREAM + 'arrival = "trace"\ntrace = "t.csv"\nspeedup = 3\n'))
    assert own.scaled(2).rates == (8, None)
    assert [stream.speedup for stream in own.scaled(2).stream][1] == 6
    assert own.scaled(1) == own


def test_scaling_leaves_closed_streams_alone(written):
    load = read_workload(written(STREAM + 'arrival = "closed"\nclients = 3\nthink_ms = 2\n'))
    closed = load.scaled(4).stream[0]
    assert (closed.rate, closed.clients, closed.think_ms) == (None, 3, 2)


BROKEN = [
    (GOOD.replace("total_rate", "total_rat"), "unknown key 'total_rat'; did you mean 'total_rate'?"),
    (
        GOOD.replace("deadline_ms = 15", "deadline_mx = 15"),
        "'stream.0.deadline_mx'; did you mean 'deadline_ms'?",
    ),
    (STREAM + "rate = 1\nmax_bach = 4\n", "unknown key 'stream.0.max_bach'; did you mean 'max_batch'?"),
    (STREAM + "rate = 1\nxyzzy = 4\n", "unknown key 'stream.0.xyzzy'"),
    ('folder = "/tmp"\n' + STREAM + "rate = 1\n", "unknown key 'folder'"),
    (STREAM + "rate = 0\n", "stream.0.rate = 0: Input should be greater than 0"),
    (STREAM + "rate = -3\n", "stream.0.rate = -3: Input should be greater than 0"),
    (STREAM + "rate = nan\n", "stream.0.rate = nan: "),
    (STREAM + "rate = inf\n", "stream.0.rate = inf: "),
    (STREAM + 'rate = "many"\n', "stream.0.rate = 'many': "),
    ("total_rate = 0\n" + STREAM, "total_rate = 0: Input should be greater than 0"),
    (STREAM.replace("15", "0") + "rate = 1\n", "stream.0.deadline_ms = 0: Input should be greater than 0"),
    (STREAM.replace("15", "-1") + "rate = 1\n", "stream.0.deadline_ms = -1: Input should be greater than 0"),
    (STREAM.replace("15", "nan") + "rate = 1\n", "stream.0.deadline_ms = nan: "),
    ("ratio = [1]\n" + STREAM + "rate = 1\n", "ratio divides total_rate, which is missing"),
    ("total_rate = 9\nratio = [1, 2]\n" + STREAM, "ratio has 2 parts for 1 streams"),
    ("total_rate = 9\nratio = [1, 0]\n" + 2 * STREAM, "ratio.1 = 0: Input should be greater than 0"),
    ("duration_s = 2\nwarmup_s = 2\n" + STREAM + "rate = 1\n", "warmup_s = 2 leaves nothing of duration_s = 2"),
    ("duration_s = 2\nwarmup_s = 3\n" + STREAM + "rate = 1\n", "warmup_s = 3 leaves nothing of duration_s = 2"),
    ("duration_s = 0\n" + STREAM + "rate = 1\n", "duration_s = 0: Input should be greater than 0"),
    ("seed = -1\n" + STREAM + "rate = 1\n", "seed = -1: "),
    (STREAM, "stream 0 (resnet50) has no rate, and there is no total_rate"),
    (STREAM + 'arrival = "uniform"\n', "stream 0 (resnet50) has no rate"),
    (STREAM + 'arrival = "trace"\n', "arrival = 'trace' needs trace = 'times.csv'"),
    (STREAM + 'arrival = "sometimes"\nrate = 1\n', "stream.0.arrival = 'sometimes': Input should be 'poisson', "),
    (STREAM + "rate = 1\nmax_batch = 0\n", "stream.0.max_batch = 0: "),
    (STREAM + "rate = 1\nmax_batch = 2.5\n", "stream.0.max_batch = 2.5: "),
    (STREAM + "rate = 1\npriority = 2\n", "stream.0.priority = 2: Input should be 1, 3 or 9"),
    (STREAM + "rate = 1\nbatch_timeout_ms = -1\n", "stream.0.batch_timeout_ms = -1: "),
    (STREAM + 'arrival = "closed"\nclients = 0\n', "stream.0.clients = 0: "),
    (
        STREAM + 'rate = 1\nmax_batch = 3\nprofiles = ["a.json", "b.json"]\n',
        "max_batch = 3 needs as many profiles, there are 2",
    ),
    (
        STREAM + 'rate = 1\narrival = "bursty"\nburst_factor = 6\nburst_share = 0.5\n',
        "burst_factor x burst_share = 3 exceeds 1",
    ),
    (STREAM + 'rate = 1\narrival = "bursty"\nburst_share = 1\n', "stream.0.burst_share = 1: "),
    ("duration_s = 1e6\n" + STREAM + "rate = 1e6\n", "more than 1000000000 requests"),
    ("duration_s = 1\nwarmup_s = 0\n", "stream is missing"),
    ("stream = []\n", "stream = []: "),
    ("stream = 3\n", "stream = 3: "),
    ("this is no TOML", "not a TOML file: "),
    ("", "stream is missing"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_file_is_refused_in_one_line_that_names_it(written, text, message):
    path = written(text)
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and message in said
    assert "\n" not in said


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"cannot read the workload: .*No such file"):
        read_workload(tmp_path / "none.toml")
    (tmp_path / "w.toml").write_bytes(b'device = "\xff\xfe"')
    with pytest.raises(WorkloadError, match="cannot read the workload"):
        read_workload(tmp_path / "w.toml")


# Profiles instead of a model


def test_a_stream_may_bring_its_own_profiles_one_for_each_batch(written, tmp_path):
    for batch in (1, 2, 3):
        write_profile(profile("mine", (4, 10 * batch), (2, 5), batch=batch), tmp_path / f"b{batch}.json")
    text = STREAM + 'rate = 1\nmax_batch = 2\nprofiles = ["b1.json", "b2.json", "b3.json"]\n'
    case = prepare(read_workload(written(text)), small_npu(100))
    assert [p.compute for p in case.setting.programs] == [(10, 5), (20, 5)]
    assert case.terms[0].max_batch == 2
    assert case.alone_s[0] == pytest.approx(15e-11)


def test_profiles_of_different_models_are_refused(written, tmp_path):
    write_profile(profile("mine", (4, 10)), tmp_path / "b1.json")
    write_profile(profile("mine", (4, 10), (4, 10), batch=2), tmp_path / "b2.json")
    load = read_workload(written(STREAM + 'rate = 1\nmax_batch = 2\nprofiles = ["b1.json", "b2.json"]\n'))
    with pytest.raises(WorkloadError, match="its profiles have different numbers of layers"):
        prepare(load, small_npu(100))


def test_a_profile_that_is_not_there_is_refused(written):
    load = read_workload(written(STREAM + 'rate = 1\nmax_batch = 1\nprofiles = ["none.json"]\n'))
    with pytest.raises(ProfileError, match=r"none\.json: cannot read the file"):
        prepare(load, small_npu(100))


@pytest.mark.parametrize(("key", "value"), [("deadline_ms", 1e15), ("batch_timeout_ms", 1e300), ("think_ms", 1e300)])
def test_times_no_clock_can_hold_are_refused(key, value):
    stream = {"model": "mobilenet-v2", "arrival": "closed", "deadline_ms": 1.0, "max_batch": 1} | {key: value}
    with pytest.raises(WorkloadError, match=key):
        prepare(parse_workload({"stream": [stream]}, "w"))


def test_a_closed_stream_takes_no_share_of_the_total_rate():
    streams = [{"model": "a", "deadline_ms": 1.0}, {"model": "b", "deadline_ms": 1.0, "arrival": "closed"}]
    assert parse_workload({"stream": streams, "total_rate": 100.0}, "w").rates == (100.0, None)
