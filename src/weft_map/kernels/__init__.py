"""The compiled search for mappings; each kernel has a plain twin in the package above."""
