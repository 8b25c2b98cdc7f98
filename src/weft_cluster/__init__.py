"""Models on many machines: their placement, routers, gates (routers as processes), and servers run by Ray."""
