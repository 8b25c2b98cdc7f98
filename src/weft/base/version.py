"""Versions of weft and of ONNX Runtime."""

__version__ = "0.2.0"


def runtime_version() -> str:
    """Return the version of ONNX Runtime."""
    from importlib.metadata import PackageNotFoundError, version

    # the GPU build has the same modules under another distribution name
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "not installed"
