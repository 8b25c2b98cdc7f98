"""Models in worker processes: what is sent, what a worker may do, how it dies and what comes after."""
