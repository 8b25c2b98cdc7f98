"""The server's settings as variables: each has its own, checked like the file's, after options, before the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from weft.base.errors import InputError
from weft.cli.serve import _settings
from weft.serving.config import GROUP_OF
from weft.serving.environment import VARIABLES, near_misses, settings_in, variable

GIVEN: dict[str, tuple[str, Any]] = {
    "models": ("models/, silero-vad", ("models/", "silero-vad")),
    "preload": ("false", False),
    "ready_when": ("any", "any"),
    "wait_for_models": ("true", True),
    "host": ("0.0.0.0", "0.0.0.0"),
    "http_port": ("9000", 9000),
    "grpc_port": ("false", None),
    "lanes": ("3", 3),
    "threads": ("2", 2),
    "backend": ("onnxruntime", "onnxruntime"),
    "pin": ("true", True),
    "policy": ("edf", "edf"),
    "policy_options": ("margin=15, alpha=0.5,lazy=true", {"margin": 15, "alpha": 0.5, "lazy": True}),
    "late": ("keep", "keep"),
    "shapes": ("camera:x=1x3x8x8,words:seq=128", ("camera:x=1x3x8x8", "words:seq=128")),
    "memory_budget_bytes": ("2_000_000_000", 2_000_000_000),
    "default_slo_ms": ("250", 250.0),
    "best_effort_ms": ("5e3", 5000.0),
    "max_body_bytes": ("1000", 1000),
    "max_connections": ("10", 10),
    "total_queue": ("20", 20),
    "tls_cert": ("/etc/cert.pem", Path("/etc/cert.pem")),
    "tls_key": ("8", Path("8")),
    "cache": ("true", Path("true")),
    "drain_s": ("5", 5.0),
    "access_log": ("true", True),
    "otlp": ("http://localhost:4318", "http://localhost:4318"),
    "learn_s": ("0", 0.0),
    "learn_first": ("true", True),
    "compile_s": ("90", 90.0),
    "max_compute_s": ("1.5", 1.5),
    "isolation": ("group:all", "group:all"),
    "device": ("cuda:1", "cuda:1"),
    "precision": ("fp16", "fp16"),
    "device_memory_bytes": ("7000", 7000),
    "gates": ("true", True),
    "allow_programs": ("true", True),
    "worker_memory_bytes": ("1000", 1000),
    "worker_kill_s": ("1", 1.0),
    "worker_spare": ("false", False),
    "worker_deaths": ("3", 3),
    "worker_deaths_s": ("20", 20.0),
    "max_inflight_bytes": ("2000", 2000),
    "max_json_bytes": ("500", 500),
    "read_s": ("7", 7.0),
    "min_bytes_per_s": ("10", 10.0),
    "reserved_connections": ("3", 3),
    "keys_file": ("keys.toml", Path("keys.toml")),
    "repository": ("read-only", "read-only"),
    "allowed_hosts": ("a.example,b.example", ("a.example", "b.example")),
    "live_settings": ("read-only", "read-only"),
    "shared_memory": ("true", True),
    "max_shared_memory_regions": ("4", 4),
    "max_shared_memory_bytes": ("5000", 5000),
}
"""Setting -> what its variable may say, and what that means; the key has tests of its own."""


def refused(**environment: str) -> str:
    with pytest.raises(InputError) as caught:
        settings_in(environment)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_every_setting_has_its_variable() -> None:
    assert {variable(key) for key in GROUP_OF} == VARIABLES.keys()
    assert {*GIVEN, "api_key"} == set(VARIABLES.values())


@pytest.mark.parametrize("setting", GIVEN)
def test_a_variable_says_what_the_file_would(setting: str) -> None:
    text, value = GIVEN[setting]
    found = settings_in({variable(setting): text})
    assert found == {setting: value} and type(found[setting]) is type(value)


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_the_page_names_every_variable(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/production.md").read_text()


def test_an_empty_variable_and_those_of_others_set_nothing() -> None:
    assert (
        settings_in({"WEFT_LANES": "", "WEFT_API_KEY_FILE": "", "WEFT_DATA": "x", "LANES": "7", "PATH": "/bin"}) == {}
    )
    assert settings_in({"WEFT_OTLP": "true"}) == {"otlp": True}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("WEFT_LANES", "two", "WEFT_LANES = 'two': "),
        ("WEFT_LANES", "0", "WEFT_LANES = 0: "),
        ("WEFT_LANES", "1.5", "WEFT_LANES = 1.5: "),
        ("WEFT_LANES", "1\nthreads = 2", r"WEFT_LANES = '1\nthreads = 2': "),
        ("WEFT_LANES", "[" * 9000, "WEFT_LANES = '[[["),
        ("WEFT_LANES", "9" * 5000, "WEFT_LANES = '999"),
        ("WEFT_HTTP_PORT", "false", "WEFT_HTTP_PORT = False: "),
        ("WEFT_HTTP_PORT", "tcp://10.0.0.7:80", "WEFT_HTTP_PORT = 'tcp://10.0.0.7:80': "),
        ("WEFT_PRELOAD", "yes", "WEFT_PRELOAD = 'yes': "),
        ("WEFT_PRELOAD", "1", "WEFT_PRELOAD = 1: "),
        ("WEFT_DRAIN_S", "inf", "WEFT_DRAIN_S = inf: "),
        ("WEFT_READY_WHEN", "most", "WEFT_READY_WHEN = 'most': "),
        ("WEFT_HOST", "a:80", "WEFT_HOST = 'a:80': "),
        ("WEFT_OTLP", "localhost", "WEFT_OTLP = 'localhost': "),
        ("WEFT_MODELS", "a\tb", r"WEFT_MODELS.0 = 'a\tb': "),
        ("WEFT_POLICY_OPTIONS", "margin", "WEFT_POLICY_OPTIONS: 'margin' is not of the form NAME=VALUE"),
        ("WEFT_POLICY_OPTIONS", "margin=much", "WEFT_POLICY_OPTIONS.margin"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_variable(name: str, text: str, said: str) -> None:
    assert refused(**{name: text}).startswith(said)


def test_options_go_before_variables_and_those_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("models = ['resnet50']\nlanes = 2\nthreads = 2\nlate = 'keep'\n")
    monkeypatch.setenv("WEFT_LANES", "3")
    monkeypatch.setenv("WEFT_THREADS", "3")
    found = _settings(str(file), {"lanes": 4}, None)
    assert (found.execution.lanes, found.execution.threads, found.scheduling.late) == (4, 3, "keep")
    assert _settings(None, {"models": ("resnet50",)}, None).execution.threads == 3
    monkeypatch.setenv("WEFT_MODELS", "magika")
    assert _settings(None, {}, None).loading.models == _settings(str(file), {}, None).loading.models == ("magika",)


def test_a_key_file_goes_before_the_settings_and_the_variable_of_the_key_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("option", "variable"):
        (tmp_path / name).write_text(f"of-the-{name}\n")
    file = tmp_path / "serve.toml"
    file.write_text("models = ['resnet50']\napi_key = 'of-the-file'\n")
    monkeypatch.setenv("WEFT_API_KEY", "of-the-client")
    assert _settings(str(file), {}, None).network.api_key == "of-the-file"
    monkeypatch.setenv("WEFT_API_KEY_FILE", str(tmp_path / "variable"))
    assert _settings(str(file), {}, None).network.api_key == "of-the-variable"
    assert _settings(str(file), {}, str(tmp_path / "option")).network.api_key == "of-the-option"
    monkeypatch.setenv("WEFT_API_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match="none: cannot read it: No such file"):
        _settings(str(file), {}, None)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WEFT_LANE", "WEFT_LANES"),
        ("WEFT_HTTPPORT", "WEFT_HTTP_PORT"),
        ("WEFT_MODEL", "WEFT_MODELS"),
        ("WEFT_MAX_BODY", "WEFT_MAX_BODY_BYTES"),
        ("WEFT_MEMORY_BUDGET", "WEFT_MEMORY_BUDGET_BYTES"),
        ("WEFT_APIKEY_FILE", "WEFT_API_KEY_FILE"),
    ],
)
def test_a_variable_that_is_spelt_wrong_is_told(name: str, meant: str) -> None:
    assert near_misses({name: "secret"}) == (f"the variable {name} sets nothing; did you mean {meant}?",)


def test_variables_that_others_set_are_not_told() -> None:
    of_a_service = (
        "WEFT_SERVICE_HOST", "WEFT_SERVICE_PORT", "WEFT_SERVICE_PORT_HTTP", "WEFT_PORT", "WEFT_PORT_8000_TCP",
        "WEFT_PORT_8000_TCP_PROTO", "WEFT_PORT_8000_TCP_PORT", "WEFT_PORT_8000_TCP_ADDR",
    )  # fmt: skip
    ours = ("WEFT_DATA", "WEFT_OIP_SCHEMA", "WEFT_PEER", "WEFT_API_KEY_FILE", *VARIABLES)
    assert near_misses(dict.fromkeys((*of_a_service, *ours, "LANE", "weft_lane"), "x")) == ()
