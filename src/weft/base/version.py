"""The package's version, and that of what runs its models, in one place."""

__version__ = "0.2.0"


def runtime_version() -> str:
    """The version of ONNX Runtime, under either of the names it is installed by."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "not installed"
