"""Samples that leave early: batches are cut and joined in the other process."""

from tests.serving.test_serve_exits import (  # noqa: F401
    live,
    nets,
    references,
    stored,
    test_answers_carry_exit_confidence_and_threshold,
    test_clients_of_the_protocol_get_the_same,
    test_many_clients_at_once_get_what_each_would_get_alone,
    test_the_threshold_moves_the_exits,
)
