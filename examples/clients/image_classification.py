"""Image classification: the most likely classes of each picture, all pictures in one request.

    weft serve lenet.onnx   # handwritten digits; the file is in weft's package, beside its test images
    python examples/clients/image_classification.py lenet three.png seven.png --classes 3

Pictures are resized to the model's input, and made grey for models with one channel. `--scaling` is the range of pixel
values that the model expects.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from PIL import Image

SCALINGS = {"bytes": (1.0, 0.0), "unit": (1 / 255, 0.0), "signed": (1 / 127.5, -1.0)}
"""Name -> factor and offset for pixels from 0 to 255."""


def pixels(path: str, channels: int, height: int, width: int, scaling: str) -> np.ndarray:
    """Read a picture as the model's input: [channel, row, column]."""
    with Image.open(path) as file:
        image = file.convert("L" if channels == 1 else "RGB").resize((width, height))
    factor, offset = SCALINGS[scaling]
    array = np.asarray(image, np.float32).reshape(height, width, channels) * np.float32(factor) + np.float32(offset)
    return array.transpose(2, 0, 1)


def classes_of(answer: Any, output: str) -> list[list[tuple[str, str]]]:
    """For every picture its classes, the most likely first, as pairs: label (or number if there is none), value."""
    classes = []
    for row in answer.as_numpy(output):
        entries = [text.decode().split(":") for text in np.atleast_1d(row)]  # value:number or value:number:label
        classes.append([(entry[2] if len(entry) > 2 else entry[1], entry[0]) for entry in entries])
    return classes


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
        (input_spec,), output = model["inputs"], model["outputs"][0]["name"]
        size = [int(side) for side in input_spec["shape"]][-3:]
        batch = np.stack([pixels(path, *size, args.scaling) for path in args.pictures])
        tensor = library.InferInput(input_spec["name"], list(batch.shape), input_spec["datatype"])
        tensor.set_data_from_numpy(batch)
        requested = library.InferRequestedOutput(output, class_count=args.classes)
        answer = server.infer(args.model, [tensor], outputs=[requested])
    for path, classes in zip(args.pictures, classes_of(answer, output), strict=True):
        print(f"{path}: " + ", ".join(f"{name} ({value})" for name, value in classes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
