"""A tool in its own package: a command, public names, and a page that shows its results.

pip install examples/tool
weft heaviest resnet18 --html heaviest.html
python -c "import weft; print(weft.heaviest(weft.load_model('resnet18')))"
"""

from __future__ import annotations

from dataclasses import dataclass

from weft import Layer, Model
from weft.reports.pictures import Shown


@dataclass(frozen=True)
class HeaviestLayers(Shown):
    """Layers of a model, those with most weights first. A notebook shows it as ``page.py`` says."""

    model: Model
    layers: tuple[Layer, ...]

    def share(self, layer: Layer) -> float:
        """The share of all weights that a layer has."""
        return layer.weights / max(1, self.model.weights)


def heaviest(model: Model, count: int = 5) -> HeaviestLayers:
    """The layers of a model that hold most of its weights."""
    layers = sorted(model.layers, key=lambda layer: layer.weights, reverse=True)
    return HeaviestLayers(model, tuple(layers[:count]))
