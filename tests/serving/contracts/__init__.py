"""Tests that the server passes on every backend: here they stand once, and test files import what they run."""
