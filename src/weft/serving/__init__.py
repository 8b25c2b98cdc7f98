"""The server: the Open Inference Protocol over HTTP and gRPC, and the engine that decides behind it."""
