"""Other servers of the protocol with the models of the table; ``python -m tests.conformance.peers`` asks them."""
