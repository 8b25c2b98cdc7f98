"""Gates: what stands before the servers of a cluster and sends every request where it is answered first."""
