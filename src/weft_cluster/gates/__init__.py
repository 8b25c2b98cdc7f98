"""Gates (routers) in front of the servers of a cluster: each request goes to the server that will answer it first.

Its modules: ``gate.py``, a gate, its interface to clients and its metrics; ``forward.py``, a forwarded request with its
retry, and a server behind a gate with its connections and health; ``board.py``, estimates and the choice of a server,
by ``routing/router.py``; ``thread.py``, a gate on a thread of its own; ``grpc_face.py``, gRPC calls as requests over
HTTP; ``cluster.html``, its page.
"""
