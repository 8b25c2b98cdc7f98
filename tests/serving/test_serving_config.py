"""Settings of models and of the server: what is taken, what is refused, and that a complaint is one line."""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.base.errors import InputError
from weft.serving.config import (
    GROUP_OF,
    GROUPS,
    ModelConfig,
    NetworkSettings,
    ServerConfig,
    is_loopback,
    one_line,
    read_api_key,
    read_model_config,
    read_server_config,
)

IN_ONE_FOLDER = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(folder: Path, text: str | bytes, name: str = "settings.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def server(folder: Path, text: str, environment: dict[str, str] | None = None) -> ServerConfig:
    return read_server_config(written(folder, text), environment=environment or {})


def refused(read, *args, **more) -> str:
    with pytest.raises(InputError) as caught:
        read(*args, **more)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_a_model_file_sets_what_it_names_and_leaves_the_rest(tmp_path):
    text = "slo_ms = 50\npriority = 1\npreload = false\n[shapes]\nimage = [1, 3, 224, 224]\nscale = []\n"
    config = read_model_config(written(tmp_path, text))
    assert config == ModelConfig(
        slo_ms=50.0, priority=1, preload=False, shapes={"image": [1, 3, 224, 224], "scale": []}
    )
    assert (config.timeout_ms, config.max_batch, config.batch_timeout_ms) == (None, None, 0.0)
    assert (config.queue_size, config.grain_ms, config.max_pieces) == (256, 5.0, 64)


def test_an_empty_model_file_means_the_defaults(tmp_path):
    assert read_model_config(written(tmp_path, "")) == ModelConfig()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("slo_mss = 5", "unknown key 'slo_mss'; did you mean 'slo_ms'?"),
        ("slo_ms = 0", "slo_ms = 0"),
        ("slo_ms = -1.5", "slo_ms = -1.5"),
        ("slo_ms = inf", "slo_ms = inf"),
        ("timeout_ms = nan", "timeout_ms = nan"),
        ("slo_ms = true", "slo_ms = True"),
        ("slo_ms = '50'", "slo_ms = '50'"),
        ("priority = 4", "priority = 4"),
        ("priority = 1.0", "priority = 1.0"),
        ("max_batch = 0", "max_batch = 0"),
        ("max_batch = 257", "max_batch = 257"),
        ("batch_timeout_ms = -1", "batch_timeout_ms = -1"),
        ("queue_size = 0", "queue_size = 0"),
        ("queue_size = true", "queue_size = True"),
        ("grain_ms = 0", "grain_ms = 0"),
        ("max_pieces = 0", "max_pieces = 0"),
        ("preload = 1", "preload = 1"),
        ("shapes = [1]", "shapes = [1]"),
        ("shapes.x = [0]", "shapes.x.0 = 0"),
        ("shapes.x = [1.0]", "shapes.x.0 = 1.0"),
        ('shapes."" = [1]', "shapes"),
        ('shapes."a\\nb" = [1]', "printable"),
        ("queue_size = 0x" + "f" * 5000, "queue_size"),
        ("slo_ms = 0x" + "f" * 5000, "slo_ms"),
        ("slo_ms = " + "9" * 5000, "not a TOML file"),
        ("slo_ms =", "not a TOML file"),
        ("slo_ms = 1\nslo_ms = 2", "not a TOML file"),
        ("x = " + "[" * 9000, "not a TOML file"),
    ],
)
def test_a_model_file_with_a_mistake_is_refused_by_name(tmp_path, line, said):
    path = written(tmp_path, line)
    message = refused(read_model_config, path)
    assert message.startswith(f"{path}: ") and said in message


def test_files_that_are_no_settings_are_refused(tmp_path):
    assert "cannot read it: No such file" in refused(read_model_config, tmp_path / "none.toml")
    assert "not a file" in refused(read_model_config, tmp_path)
    assert "cannot read it" in refused(read_model_config, written(tmp_path, b"\xff\xfe"))
    assert "larger than 1048576 bytes" in refused(read_model_config, written(tmp_path, b"#" * (2**20 + 1)))
    assert read_model_config(written(tmp_path, b"#" * 2**20)) == ModelConfig()
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(read_model_config, tmp_path / "pipe")
    assert "cannot read it" in refused(read_model_config, Path("a\0b"))


def test_a_version_overrides_only_the_settings_it_names():
    below = ModelConfig(slo_ms=50, queue_size=7, shapes={"a": [1], "b": [2]})
    above = ModelConfig(slo_ms=None, shapes={"a": [3]})
    assert below.overridden_by(above) == ModelConfig(queue_size=7, shapes={"a": [3]})
    assert below.overridden_by(ModelConfig()) == below


def test_the_server_listens_on_this_machine_only_unless_told_otherwise():
    config = ServerConfig()
    assert config.network == NetworkSettings(host="127.0.0.1", http_port=8000, grpc_port=8001, drain_s=30.0)
    assert (config.scheduling.default_slo_ms, config.scheduling.best_effort_ms) == (1000.0, 60000.0)
    assert (config.limits.total_queue, config.execution.threads) == (4096, 1)
    assert config.warnings == () and config.network.api_key is None


@pytest.mark.parametrize(("cores", "lanes"), [(1, 1), (2, 1), (3, 2), (64, 63)])
def test_a_core_is_left_to_the_network_unless_there_is_only_one(tmp_path, monkeypatch, cores, lanes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert ServerConfig().execution.lanes == server(tmp_path, "").execution.lanes == lanes
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert ServerConfig().execution.lanes == lanes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"http_port": 65536}, "http_port = 65536"),
        ({"http_port": -1}, "http_port = -1"),
        ({"http_port": True}, "http_port = True"),
        ({"http_port": "8000"}, "http_port = '8000'"),
        ({"http_port": None}, "http_port = None"),
        ({"http_port": 9000, "grpc_port": 9000}, "both 9000"),
        ({"lanes": 0}, "lanes = 0"),
        ({"threads": 0}, "threads = 0"),
        ({"pin": 1}, "pin = 1"),
        ({"pin": True, "threads": 2}, "pin cannot go with threads = 2: only lanes are kept on cores"),
        ({"policy": ""}, "policy = ''"),
        ({"policy_options": {"a": "b"}}, "policy_options.a"),
        ({"policy_options": {"a": float("nan")}}, "policy_options.a"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes = 0"),
        ({"default_slo_ms": 0}, "default_slo_ms = 0"),
        ({"best_effort_ms": float("inf")}, "best_effort_ms = inf"),
        ({"max_body_bytes": 0}, "max_body_bytes = 0"),
        ({"max_connections": 0}, "max_connections = 0"),
        ({"total_queue": 0}, "total_queue = 0"),
        ({"drain_s": -1}, "drain_s = -1"),
        ({"preload": "no"}, "preload = 'no'"),
        ({"ready_when": "some"}, "ready_when = 'some'"),
        ({"tls_cert": Path("c.pem")}, "tls_cert is set and tls_key is not"),
        ({"tls_key": Path("k.pem")}, "tls_key is set and tls_cert is not"),
        ({"otlp": "localhost:4318"}, "otlp"),
        ({"models": ("a\nb",)}, "models.0"),
        ({"host": ""}, "host = ''"),
        ({"host": "127.0.0.1:8000"}, "host = '127.0.0.1:8000'"),
        ({"host": "[::1]"}, "host = '[::1]'"),
        ({"host": "300.1.1.1"}, "host = '300.1.1.1'"),
        ({"host": "a b"}, "host = 'a b'"),
        ({"host": "::1%a\nb"}, "host"),
    ],
)
def test_a_value_the_server_cannot_use_is_refused_by_name(changes, said):
    assert said in refused(ServerConfig, **changes)


def test_what_is_replaced_in_a_configuration_is_checked_too():
    assert replace(ServerConfig(), http_port=0, grpc_port=0).network.http_port == 0
    assert "lanes = -1" in refused(replace, ServerConfig(), lanes=-1)
    assert "host = 'a b'" in refused(replace, ServerConfig(), network=NetworkSettings(host="a b"))
    assert refused(ServerConfig, lane=1) == "unknown key 'lane'; did you mean 'lanes'?"


def test_every_key_is_in_one_group_and_every_group_is_small():
    keys = [key.name for group in GROUPS.values() for key in fields(group)]
    assert sorted(keys) == sorted(GROUP_OF) and not GROUPS.keys() & GROUP_OF.keys()
    for kind in (ServerConfig, *GROUPS.values()):
        assert len([name for name in dir(kind) if not name.startswith("_")]) <= 12, kind


def test_settings_outside_of_their_group_are_read_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"ServerConfig.lanes is ServerConfig.execution.lanes now"):
        assert ServerConfig(lanes=3).lanes == 3
    with pytest.raises(AttributeError, match="no attribute 'lane'"):
        ServerConfig().lane  # noqa: B018


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "\u00fc" * 8, "x" * 4097, 12345678])
def test_a_bad_key_is_refused_without_showing_it(key):
    message = refused(ServerConfig, api_key=key)
    assert "api_key" in message
    assert not str(key) or str(key) not in message


def test_a_configuration_does_not_print_its_key():
    assert "s3cret" not in repr(ServerConfig(api_key="s3cret"))


LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST"]
OPEN = ["0.0.0.0", "::", "192.168.1.5", "::ffff:10.0.0.1", "localhost.example.org", "fe80::1%eth0", "127.example.org"]


@pytest.mark.parametrize("host", LOOPBACK + OPEN)
def test_only_an_open_and_unprotected_server_is_warned_about(host):
    bare = ServerConfig(host=host)
    assert is_loopback(host) == (host in LOOPBACK)
    assert len(bare.warnings) == (host in OPEN)
    assert all(host in line and line.isprintable() for line in bare.warnings)
    assert replace(bare, api_key="k").warnings == ()
    with_tls = replace(bare, tls_cert=Path("c"), tls_key=Path("k"))
    assert len(with_tls.warnings) == len(bare.warnings)
    assert all("no API key is set; anyone who can reach it may" in line for line in with_tls.warnings)


@pytest.mark.parametrize("host", LOOPBACK + OPEN)
def test_memory_is_shared_with_this_machine_only_unless_told_otherwise(host):
    bare = ServerConfig(host=host)
    assert bare.shares_memory == (host in LOOPBACK)
    assert not replace(bare, allowed_hosts=("weft.example",)).shares_memory  # a proxy may stand before it
    assert replace(bare, shared_memory=True).shares_memory and not replace(bare, shared_memory=False).shares_memory


WHOLE = """
models = ["resnet50", "repository", "one.onnx", "two.pt2", "/srv/models", "sub/other", "unheard-of"]
shapes = ["one:x=1x3", "two:seq=128"]
host = "0.0.0.0"
http_port = 9000
grpc_port = false
lanes = 1000
allow_programs = true
backend = "other"
threads = 3
preload = false
ready_when = "any"
wait_for_models = true
late = "demote"
policy = "edf"
policy_options = { alpha = 0.5, depth = 3, lazy = true }
memory_budget_bytes = 1_000_000
default_slo_ms = 100
best_effort_ms = 5000
max_body_bytes = 1000
max_connections = 10
total_queue = 20
api_key_file = "key.txt"
tls_cert = "tls/cert.pem"
tls_key = "/etc/key.pem"
cache = "cache"
drain_s = 5
access_log = true
learn_s = 5
learn_first = true
compile_s = 6
max_compute_s = 5
otlp = "http://localhost:4318"
isolation = "group:all"
worker_memory_bytes = 2_000_000_000
worker_kill_s = 1
worker_spare = false
worker_deaths = 3
worker_deaths_s = 20
max_inflight_bytes = 2000
max_json_bytes = 500
read_s = 7
min_bytes_per_s = 10
reserved_connections = 3
keys_file = "keys.toml"
repository = "read-only"
live_settings = "read-only"
allowed_hosts = ["a.example", "b.example"]
shared_memory = true
max_shared_memory_regions = 4
max_shared_memory_bytes = 5000
"""


def test_a_file_may_set_everything_with_paths_from_its_folder(tmp_path):
    written(tmp_path, "s3cret\n", "key.txt")
    (tmp_path / "repository").mkdir()
    (tmp_path / "resnet50").mkdir()  # a name that weft knows stays a name
    config = server(tmp_path, WHOLE, {"WEFT_API_KEY": "another"})
    beside = [str(tmp_path / name) for name in ("repository", "one.onnx", "two.pt2", "sub/other")]
    read = {
        "models": ("resnet50", *beside[:3], "/srv/models", beside[3], "unheard-of"),
        "shapes": ("one:x=1x3", "two:seq=128"),
        "tls_cert": tmp_path / "tls/cert.pem",
        "tls_key": Path("/etc/key.pem"),
        "cache": tmp_path / "cache",
        "keys_file": tmp_path / "keys.toml",
        "allowed_hosts": ("a.example", "b.example"),
        "grpc_port": None,
    }
    wanted = tomllib.loads(WHOLE) | read | {"api_key": "s3cret"}
    del wanted["api_key_file"]
    assert {key: config.value_of(key) for key in wanted} == wanted
    assert [type(value) for value in config.scheduling.policy_options.values()] == [float, int, bool]
    defaults = ServerConfig()
    same = [key for key in GROUP_OF if config.value_of(key) == defaults.value_of(key)]
    assert same == ["pin", "device", "precision", "device_memory_bytes", "gates"]  # not with threads and isolation
    assert server(tmp_path, "pin = true").execution.pin is True
    on_gpu = server(
        tmp_path, 'device = "cuda:1"\nprecision = "fp16"\ndevice_memory_bytes = 7000\ngates = true'
    ).execution
    assert (on_gpu.device, on_gpu.precision, on_gpu.device_memory_bytes) == ("cuda:1", "fp16", 7000) and on_gpu.gates


def test_a_file_may_set_nothing(tmp_path):
    assert server(tmp_path, "") == ServerConfig()
    assert server(tmp_path, "otlp = true").telemetry.otlp is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 1", "unknown key 'port'"),
        (
            'device = "gpu0"',
            "device = 'gpu0': must be a device, as cuda:0, or several of a kind with commas between them",
        ),
        ("http_prt = 1", "unknown key 'http_prt'; did you mean 'http_port'?"),
        ('"a\\nb" = 1', r"unknown key 'a\nb'"),
        ("warnings = []", "unknown key 'warnings'"),
        ("http_port = false", "http_port = False"),
        ("models = 'one'", "models"),
        ("models = [1]", "models.0 = 1"),
        ("tls_cert = 1\ntls_key = 'a'", "tls_cert = 1"),
        ("api_key_file = 1", "api_key_file must be"),
        ("api_key_file = 'none.txt'", "none.txt: cannot read it: No such file"),
        ("api_key_file = 'a'\napi_key = 'b'", "both set"),
        ("http_port = 0x" + "f" * 5000, "http_port"),
        ("http_port = ", "not a TOML file"),
    ],
)
def test_a_server_file_with_a_mistake_is_refused_by_name(tmp_path, text, said):
    assert said in refused(server, tmp_path, text)


def test_a_key_comes_from_the_file_before_the_environment(tmp_path):
    path = written(tmp_path, "  from-file \n", "key.txt")
    environment = {"WEFT_API_KEY": "from-environment"}
    assert read_api_key(path, environment) == "from-file"
    assert read_api_key(None, environment) == "from-environment"
    assert read_api_key(None, {}) is None and read_api_key(None, {"WEFT_API_KEY": ""}) is None
    assert server(tmp_path, "", environment).network.api_key == "from-environment"
    assert server(tmp_path, "api_key = 'written'", environment).network.api_key == "written"


def test_the_environment_of_the_process_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_API_KEY", "of-the-process")
    assert read_server_config(written(tmp_path, "")).network.api_key == "of-the-process"


def test_a_key_file_with_no_key_or_two_is_refused_without_showing_it(tmp_path):
    assert "an API key must be" in refused(read_api_key, written(tmp_path, "\n"), {})
    message = refused(read_api_key, written(tmp_path, "first\nsecond\n"), {})
    assert "an API key must be" in message and "first" not in message
    assert "first" not in refused(read_api_key, None, {"WEFT_API_KEY": "first second"})


@settings(deadline=None)
@given(st.text(st.characters()))  # lone surrogates too, as file names may have them
def test_one_line_is_printable_and_encodable_whatever_it_is_given(text):
    shown = one_line(text)
    assert shown.isprintable() and shown.encode("utf-8")[:0] == b""
    assert shown == text or not text.isprintable()


KEYS = st.sampled_from([*ModelConfig.model_fields, *GROUP_OF, "api_key_file", "x"])
VALUES = st.one_of(
    st.sampled_from(["-1", "0", "1", "1.5", "inf", "nan", "true", "1979-05-27", "0x" + "f" * 4000]),
    st.sampled_from(["''", "'a'", "'127.0.0.1'", "'http://a'", "'\\u0000'", '"\\u0000\\n"']),
    st.sampled_from(["[]", "[1]", "['a']", "[[1, 'a']]", "{}", "{x = [1]}", "{x = 'a'}"]),
    st.integers().map(str),
    st.floats().map(str),
)
LINES = st.tuples(KEYS, VALUES).map(" = ".join)


@IN_ONE_FOLDER
@given(st.one_of(st.binary(max_size=80), st.lists(LINES, max_size=4, unique_by=lambda line: line.split()[0])))
def test_any_file_is_read_or_refused_in_one_line(tmp_path, content):
    path = written(tmp_path, content if isinstance(content, bytes) else "\n".join(content))
    for read in (read_model_config, lambda path: read_server_config(path, environment={})):
        try:
            config = read(path)
        except InputError as error:
            assert str(error).isprintable()
        else:
            assert isinstance(config, ModelConfig | ServerConfig)


@IN_ONE_FOLDER
@given(st.lists(LINES.filter(lambda line: line.split()[0] in ModelConfig.model_fields), max_size=1))
def test_an_accepted_setting_is_in_its_range(tmp_path, lines):
    try:
        config = read_model_config(written(tmp_path, "\n".join(lines)))
    except InputError:
        return
    assert 0 <= config.priority <= 3 and config.queue_size >= 1 and 0 < config.grain_ms <= 1e9
    assert all(limit is None or 0 < limit <= 1e9 for limit in (config.slo_ms, config.timeout_ms))
    assert all(size >= 1 for shape in config.shapes.values() for size in shape)
