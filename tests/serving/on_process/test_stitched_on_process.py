"""Models with one body: their samples are mixed in the other process."""

from tests.serving.test_serve_stitched import (  # noqa: F401
    file,
    folder,
    server,
    test_counters_are_by_model_and_memory_is_counted_once,
    test_requests_over_grpc_are_answered_like_any_model_s,
    test_requests_over_http_are_answered_in_one_go,
)
