"""ONNX Runtime on the CPU: files cut into sessions, measured, cached, and run on a thread for each lane."""
