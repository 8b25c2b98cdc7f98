"""What a client may set when it has a model loaded, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.base.errors import BadRequest, RequestError, Unsupported
from weft.serving.client_settings import parameters_of, requested_settings
from weft.serving.config import ModelConfig

CURRENT = ModelConfig(slo_ms=100, shapes={"x": [1, 3]}, labels={"y": "labels.txt"})
SHOWN = {
    "name": "net",
    "platform": "onnxruntime_onnx",
    "backend": "onnxruntime",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3], "label_filename": "labels.txt"}],
    "parameters": parameters_of(CURRENT),
}


def asked(**config: Any) -> dict[str, Any]:
    """The settings that a configuration names."""
    found = requested_settings({"config": json.dumps(config)}, SHOWN)
    assert found is not None
    return found.model_dump(exclude_unset=True)


def test_without_a_config_there_are_no_settings() -> None:
    assert requested_settings({}, SHOWN) is None


def test_fields_that_mean_something_here_are_taken() -> None:
    batching = {
        "max_queue_delay_microseconds": "2500",
        "default_priority_level": 2,
        "default_queue_policy": {"max_queue_size": 7, "default_timeout_microseconds": 50_000},
    }
    assert asked(max_batch_size=4, dynamic_batching=batching) == {
        "max_batch": 4,
        "batch_timeout_ms": 2.5,
        "priority": 2,
        "queue_size": 7,
        "timeout_ms": 50.0,
    }
    assert asked(max_batch_size=0) == {"max_batch": 1}


def test_our_own_settings_come_as_parameters() -> None:
    given = {"weft_slo_ms": "25", "weft_shapes": '{"x": [1, 5]}', "weft_exit_threshold": "0.5"}
    found = asked(parameters={key: {"string_value": text} for key, text in given.items()})
    assert found == {"slo_ms": 25.0, "shapes": {"x": [1, 5]}, "exit_threshold": 0.5}


def test_what_was_shown_may_be_sent_back() -> None:
    found = asked(**SHOWN, optimization={}, instance_group=[], model_warmup=[], runtime="")
    assert found["max_batch"] == 8 and found["slo_ms"] == 100 and "labels" not in found
    changed = asked(**(SHOWN | {"max_batch_size": 2}))
    assert changed == found | {"max_batch": 2}


@pytest.mark.parametrize(
    ("config", "error", "why"),
    [
        ({"name": "other"}, Unsupported, "'name' cannot be set"),
        ({"backend": "python"}, Unsupported, "'backend' cannot be set"),
        ({"sequence_batching": {"max_sequence_idle_microseconds": 1}}, Unsupported, "'sequence_batching'"),
        ({"model_transaction_policy": {"decoupled": True}}, Unsupported, "'model_transaction_policy'"),
        ({"instance_group": [{"count": 2}]}, Unsupported, "'instance_group'"),
        ({"version_policy": {"specific": {"versions": [1]}}}, Unsupported, "'version_policy'"),
        ({"input": [{"name": "x", "data_type": "TYPE_INT8", "dims": [3]}]}, Unsupported, "'input'"),
        ({"output": [{"name": "y", "label_filename": "weft.toml"}]}, Unsupported, "'output'"),
        ({"dynamic_batching": {"preferred_batch_size": [4]}}, Unsupported, "dynamic_batching.preferred_batch_size"),
        ({"dynamic_batching": []}, BadRequest, "dynamic_batching must be a JSON object"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": "soon"}}, BadRequest, "must be a whole number"),
        ({"dynamic_batching": {"default_queue_policy": {"timeout_action": "DELAY"}}}, Unsupported, "timeout_action"),
        ({"parameters": {"weft_isolation": {"string_value": "threads"}}}, Unsupported, "'weft_isolation'"),
        ({"parameters": {"weft_labels": {"string_value": '{"y": "weft.toml"}'}}}, Unsupported, "'weft_labels'"),
        ({"parameters": {"weft_max_compute_s": {"string_value": "0"}}}, Unsupported, "'weft_max_compute_s'"),
        ({"parameters": {"other": {"string_value": "1"}}}, Unsupported, "'other'"),
        ({"parameters": {"slo_ms": {"string_value": "1"}}}, Unsupported, "'slo_ms'"),
        ({"parameters": {"weft_slo_ms": "1"}}, BadRequest, "must be .*string_value"),
        ({"parameters": {"weft_slo_ms": {"string_value": "-1"}}}, BadRequest, "slo_ms = -1"),
        ({"max_batch_size": "many"}, BadRequest, "max_batch = 'many'"),
        ({"max_batch_size": 100_000}, BadRequest, "max_batch = 100000"),
    ],
)
def test_all_else_is_refused_by_name(config: dict[str, Any], error: type[RequestError], why: str) -> None:
    with pytest.raises(error, match=why):
        asked(**config)


@pytest.mark.parametrize(
    ("parameters", "error", "why"),
    [
        ({"config": "{"}, BadRequest, "config is not the JSON"),
        ({"config": 7}, BadRequest, "config is not the JSON"),
        ({"config": "[]"}, BadRequest, "config must be a JSON object"),
        ({"file:1/model.onnx": "AAAA", "config": "{}"}, Unsupported, "'file:1/model.onnx' is not supported"),
        ({"unload_dependents": True}, BadRequest, "load takes the parameter config, not 'unload_dependents'"),
    ],
)
def test_parameters_that_cannot_be_are_refused(parameters: dict[str, Any], error: type[RequestError], why: str) -> None:
    with pytest.raises(error, match=why):
        requested_settings(parameters, SHOWN)
