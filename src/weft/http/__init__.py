"""HTTP/1.1 as weft speaks it: the server's connections, messages and limits, and the client of load and gates.

``server.py`` reads requests and writes answers, ``messages.py`` has both as values; ``listening.py`` accepts
connections; ``limits.py``, ``budget.py``, ``places.py`` and ``progress.py`` say what is let in, ``long_bodies.py`` how
much of it at a time, ``lingering.py`` throws away what is not; ``unpacking.py`` and ``encoding.py`` are compressed
bodies; ``hops.py``, what a server and a gate tell each other; ``client.py`` and ``answers.py`` are the other side.
"""
