"""HTTP/1.1 as weft speaks it: the server's connections, messages and limits, and the client of load and gates."""
