"""A request that never ends: it is stopped in the other process, and nothing else is."""

from tests.serving.test_serve_endless import (  # noqa: F401
    folder,
    server,
    test_a_loop_of_few_turns_is_answered,
    test_beside_it_health_and_other_models_are_answered,
    test_it_is_stopped_at_its_deadline,
    test_it_is_stopped_when_its_client_goes_away,
    test_the_end_of_the_server_stops_it_and_it_hears_so,
)
