"""Input files of commands: a profile, a device and workloads."""

from __future__ import annotations

PROFILE = {
    "format": 1,
    "model": "mine",
    "device": "my-chip",
    "batch": 1,
    "layers": [
        {"name": "a", "compute_s": 1e-4, "weight_bytes": 1_000_000, "activation_bytes": 1000},
        {"name": "b", "compute_s": 1e-6, "weight_bytes": 9_000_000, "activation_bytes": 1000},
    ],
}

DEVICE = """
kind = "npu"
name = "my-chip"
clock_mhz = 500.0
array_rows = 64
array_columns = 64
bandwidth_gb_s = {bandwidth}
weight_buffer_mib = 16.0
activation_buffer_mib = 8.0
weight_rows_per_cycle = 64
vector_bytes_per_cycle = 256.0
{extra}
"""

WORKLOAD = """
device = "weaver-plus"
total_rate = 4000.0
ratio = [2, 1]
duration_s = 0.3
warmup_s = 0.05

[[stream]]
model = "resnet50"
deadline_ms = 15.0

[[stream]]
model = "bert-base"
deadline_ms = 130.0
"""

EXITS = """
device = "zc706-resnet50"
duration_s = 1.0

[[stream]]
model = "resnet50"
rate = 2.0
deadline_ms = 400.0
max_batch = 1

[[stream]]
model = "resnet50"
rate = 2.0
deadline_ms = 400.0
max_batch = 1
exits = 3
exit_rates = [0.051, 0.169, 0.09, 0.69]

[[stream]]
model = "mobilenet-v2"
rate = 2.0
deadline_ms = 400.0
max_batch = 1
exits = 1
exit_record = "r.npz"
exit_threshold = 0.75
"""
