"""Weight-shared models to stitch: drawn at random (``generator``), or trained and zipped (``torch_zipping``)."""
