"""The compiled simulation of a cluster, and the rules by which requests are routed."""
