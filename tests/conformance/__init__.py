"""The Open Inference Protocol as a table: requests over HTTP and gRPC, and what must come back for each.

``table/`` has the rows, ``rows`` reads them, ``models`` makes what they ask for, ``over_http`` and ``over_grpc`` send
them, ``matching`` compares, ``judging`` does all of it for one row. ``python -m tests.conformance`` asks any server.
"""
