"""HTTP/1.1: the server's connections, messages and limits, and the client of the load generator and of gates.

``server.py`` listens and closes connections, ``connections.py`` reads requests and writes answers, ``messages.py`` has
both as values. ``limits.py`` bounds the cost of clients, ``bodies.py`` handles long, slow and compressed bodies.
``client.py`` is the client.
"""
