"""The compiled search for mappings, whose kernels have plain twins in the package above; and reads of memory."""
