"""Old names of modules, which go on working: imports of them are answered with the module that has moved.

``MOVED`` holds the paths that changed in 0.3; importing one warns, and this table ends with the next release. The
documented submodules of tools (``weft.mapping``, ``weft.stitching`` ...) are registered by the tools themselves, stay,
and do not warn.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

MOVED = {
    "weft.errors": "weft.base.errors",
    "weft.files": "weft.base.files",
    "weft.jsonfile": "weft.base.jsonfile",
    "weft.version": "weft.base.version",
    "weft.shapes": "weft.base.shapes",
    "weft.shown": "weft.reports.shown",
    "weft.costs": "weft.devices.costs",
    "weft.runtime.twins": "weft.runtime.cuda.twins",
    "weft.policies": "weft.engine.policies",
    "weft.survey": "weft.planning.survey",
    "weft.reports.mapping_numbers": "weft_map.pages.numbers",
    "weft.reports.mapping_picture": "weft_map.pages.picture",
    "weft.reports.mapping_page": "weft_map.pages.page",
    "weft.reports.mapping_dynamic": "weft_map.pages.dynamic",
    "weft.reports.stitching": "weft_stitch.pages.report",
    "weft.reports.stitching_body": "weft_stitch.pages.body",
    "weft.reports.stitching_picture": "weft_stitch.pages.picture",
    "weft.reports.stitching_shown": "weft_stitch.pages.tables",
    "weft.reports.tuning_page": "weft_tune.pages.page",
    "weft.reports.tuning_picture": "weft_tune.pages.picture",
    "weft.reports.tuning_shown": "weft_tune.pages.tables",
    "weft.reports.plan_picture": "weft.planning.plan_picture",
    "weft.reports.placement_picture": "weft_cluster.placing.placement_picture",
    "weft.reports.loads": "weft.simulation.loads_picture",
    "weft.reports.comparison_page": "weft.simulation.comparison_page",
    "weft.reports.run_pictures": "weft.simulation.run_pictures",
    "weft.reports.run_tables": "weft.simulation.run_tables",
    "weft.reports.run_shown": "weft.simulation.run_shown",
    "weft.reports.report": "weft.simulation.report",
    "weft.reports.requests": "weft.simulation.request_report",
    "weft.reports.designs": "weft.simulation.designs",
    "weft.kernels.soc": "weft_map.kernels.soc",
    "weft.kernels.soc_bound": "weft_map.kernels.soc_bound",
    "weft.kernels.soc_delays": "weft_map.kernels.soc_delays",
    "weft.kernels.soc_search": "weft_map.kernels.soc_search",
    "weft.kernels.contention": "weft_map.kernels.contention",
    "weft.kernels.cluster_loop": "weft_cluster.kernels.cluster_loop",
    "weft.kernels.cluster_state": "weft_cluster.kernels.cluster_state",
    "weft.kernels.routing_rules": "weft_cluster.kernels.routing_rules",
    "weft.kernels.numbers": "weft_tune.kernels.numbers",
    "weft.kernels.simd": "weft_tune.kernels.simd",
    "weft.serving.http": "weft.http.server",
    "weft.serving.http_limits": "weft.http.limits",
    "weft.serving.http_messages": "weft.http.messages",
    "weft.serving.lingering": "weft.http.lingering",
    "weft.serving.listening": "weft.http.listening",
    "weft.serving.long_bodies": "weft.http.long_bodies",
    "weft.serving.places": "weft.http.places",
    "weft.serving.progress": "weft.http.progress",
    "weft.serving.budget": "weft.http.budget",
    "weft.serving.hops": "weft.http.hops",
    "weft.serving.unpacking": "weft.http.unpacking",
    "weft.serving.encoding": "weft.http.encoding",
    "weft.load.client": "weft.http.client",
    "weft.load.answers": "weft.http.answers",
    "weft.cli.map": "weft_map.cli.map",
    "weft.cli.map_dynamic": "weft_map.cli.map_dynamic",
    "weft.cli.map_show": "weft_map.cli.map_show",
    "weft.cli.calibrate": "weft_map.cli.calibrate",
    "weft.cli.stitch": "weft_stitch.cli.stitch",
    "weft.cli.stitch_show": "weft_stitch.cli.stitch_show",
    "weft.cli.generate": "weft_stitch.cli.generate",
    "weft.cli.tune": "weft_tune.cli.tune",
    "weft.cli.tune_show": "weft_tune.cli.tune_show",
    "weft.cli.tune_target": "weft_tune.cli.tune_target",
    "weft.cli.place": "weft_cluster.cli.place",
    "weft.cli.place_change": "weft_cluster.cli.place_change",
    "weft.cli.place_show": "weft_cluster.cli.place_show",
    "weft.cli.cluster": "weft_cluster.cli.cluster",
    "weft.cli.cluster_show": "weft_cluster.cli.cluster_show",
    "weft.cli.ray": "weft_cluster.cli.ray",
    "weft.cli.reproduce": "weft_papers.cli.reproduce",
    "weft.planning.eight_bits": "weft_tune.plan_int8",
    "weft.runtime.cuda.torch_bodies": "weft_stitch.on_device.body_file",
    "weft.runtime.cuda.torch_rounds": "weft_stitch.on_device.fused_file",
    "weft.placing.rivals.alpaserve": "weft_cluster.placing.alpaserve",
    "weft.placing.rivals": "weft_papers.placing_rivals",
    "weft.stitching.running.rivals": "weft_stitch.running.ways",
    "weft.planning.across": "weft_cluster.plan_across",
}
"""Module or package -> where it is now; what is inside a package moved with it."""


_HERE = frozenset(path.name for path in Path(__file__).parents[1].iterdir() if (path / "__init__.py").is_file())
"""Packages of the core, for which the registry need not be read; an old folder may still hold compiled files."""


def new_name(name: str) -> tuple[str, bool] | None:
    """Where a module is now, and whether its old name is a documented one; None for every other module."""
    package, _, rest = name.partition(".")
    if package != "weft" or not rest:
        return None
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        prefix, inside = ".".join(parts[:count]), parts[count:]
        if prefix in MOVED:
            return ".".join((MOVED[prefix], *inside)), False
    if parts[1] in _HERE:
        return None
    from weft.base.registry import registered

    stays = registered("modules").get(parts[1])
    return (".".join((stays.target, *parts[2:])), True) if stays else None


class _MovedModules(MetaPathFinder, Loader):
    """Finds modules by their old names. It comes first: the files beside a moved package must not be loaded twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith("weft.") and new_name(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = new_name(module.__name__)
        assert found is not None
        name, documented = found
        if not documented:
            warnings.warn(
                f"{module.__name__} is {name} now; the old name ends with 0.4", DeprecationWarning, stacklevel=2
            )
        sys.modules[module.__name__] = import_module(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the module that has moved, for ``python -m``."""
        found = new_name(fullname)
        spec = find_spec(found[0]) if found else None
        return spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None


def install() -> None:
    """Answer imports of old names from now on."""
    sys.meta_path.insert(0, _MovedModules())
