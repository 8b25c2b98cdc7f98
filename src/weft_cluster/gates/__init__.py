"""Gates: what stands before the servers of a cluster and sends every request where it is answered first.

Its modules: ``gate.py``, its face, which is the server's (``weft.http``), and its metrics; ``forward.py``, a request on
its way to one server or two, and a server: connections, and whether it is there; ``board.py``, estimates and the
choice, by ``routing/router.py``; ``thread.py``, a gate beside another loop; ``grpc_face.py``, calls over gRPC as
requests over HTTP; ``cluster.html``, its page.
"""
