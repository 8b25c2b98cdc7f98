"""What is on these pictures? The server is asked for the most likely classes of each, all pictures in one request.

    weft serve lenet.onnx   # handwritten digits; it lies in weft's own package, beside the images it was tested with
    python examples/clients/image_classification.py lenet three.png seven.png --classes 3

Pictures are made as large as the model wants them, and grey for models with one channel. `--scaling` says what a model
expects of its pixels.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from PIL import Image

SCALINGS = {"bytes": (1.0, 0.0), "unit": (1 / 255, 0.0), "signed": (1 / 127.5, -1.0)}
"""Name -> by what a pixel from 0 to 255 is multiplied, and what is added."""


def pixels(path: str, channels: int, height: int, width: int, scaling: str) -> np.ndarray:
    """A picture as the model wants it: channels first."""
    with Image.open(path) as opened:
        image = opened.convert("L" if channels == 1 else "RGB").resize((width, height))
    factor, more = SCALINGS[scaling]
    array = np.asarray(image, np.float32).reshape(height, width, channels) * np.float32(factor) + np.float32(more)
    return array.transpose(2, 0, 1)


def classes_of(answer: Any, output: str) -> list[list[tuple[str, str]]]:
    """For every picture its classes, the most likely first: labels, or numbers where there are none; and values."""
    found = []
    for row in answer.as_numpy(output):
        parts = [text.decode().split(":") for text in np.atleast_1d(row)]
        found.append([(each[2] if len(each) > 2 else each[1], each[0]) for each in parts])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("pictures", nargs="+", metavar="PICTURE")
    parser.add_argument("--address", default="127.0.0.1:8000")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument("--classes", type=int, default=1)
    parser.add_argument("--scaling", choices=SCALINGS, default="unit")
    args = parser.parse_args(argv)
    library = tritonclient.http if args.protocol == "http" else tritonclient.grpc
    with library.InferenceServerClient(args.address) as server:
        model = server.get_model_metadata(args.model, **({} if args.protocol == "http" else {"as_json": True}))
        (wanted,), output = model["inputs"], model["outputs"][0]["name"]
        size = [int(each) for each in wanted["shape"]][-3:]
        batch = np.stack([pixels(path, *size, args.scaling) for path in args.pictures])
        tensor = library.InferInput(wanted["name"], list(batch.shape), wanted["datatype"])
        tensor.set_data_from_numpy(batch)
        asked = library.InferRequestedOutput(output, class_count=args.classes)
        answer = server.infer(args.model, [tensor], outputs=[asked])
    for path, classes in zip(args.pictures, classes_of(answer, output), strict=True):
        print(f"{path}: " + ", ".join(f"{name} ({value})" for name, value in classes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
