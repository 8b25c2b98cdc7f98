"""Weight-shared models to stitch: with random weights (``generator``, ``encoders``), or trained ones (``zipped``)."""
