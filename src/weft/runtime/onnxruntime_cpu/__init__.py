"""ONNX Runtime on the CPU: files cut into sessions, measured, cached, and run on a thread for each lane.

Newer versions of it tell their maker, over the network, that and where they run. Here they do not, unless the variable
ORT_DISABLE_TELEMETRY says otherwise; it must stand before onnxruntime is imported.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
