"""Aliases of modules that have moved: importing an old path returns the module at its new path.

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
    "weft.shown": "weft.reports.pictures",
    "weft.reports.shown": "weft.reports.pictures",
    "weft.costs": "weft.devices.costs",
    "weft.planning.toml_text": "weft.base.tomlfile",
    "weft.runtime.twins": "weft.runtime.cuda.cpu_twins",
    "weft.policies": "weft.engine.policies",
    "weft.survey": "weft.planning.survey",
    "weft.reports.mapping_numbers": "weft_map.pages.numbers",
    "weft.reports.mapping_picture": "weft_map.pages.picture",
    "weft.reports.mapping_page": "weft_map.pages.page",
    "weft.reports.mapping_dynamic": "weft_map.pages.picture",
    "weft.reports.stitching": "weft_stitch.pages",
    "weft.reports.stitching_body": "weft_stitch.pages",
    "weft.reports.stitching_picture": "weft_stitch.pages",
    "weft.reports.stitching_shown": "weft_stitch.pages",
    "weft.reports.tuning_page": "weft_tune.pages.page",
    "weft.reports.tuning_picture": "weft_tune.pages.picture",
    "weft.reports.tuning_shown": "weft_tune.pages.page",
    "weft.reports.plan_picture": "weft.planning.plan_shown",
    "weft.reports.placement_picture": "weft_cluster.placing.placement_shown",
    "weft.reports.loads": "weft.simulation.run_shown",
    "weft.reports.comparison_page": "weft.simulation.comparison_page",
    "weft.reports.run_pictures": "weft.simulation.run_shown",
    "weft.reports.run_tables": "weft.simulation.run_tables",
    "weft.reports.run_shown": "weft.simulation.run_shown",
    "weft.reports.report": "weft.simulation.report",
    "weft.reports.requests": "weft.simulation.request_report",
    "weft.reports.designs": "weft.simulation.designs",
    "weft.kernels.streaming": "weft_map.kernels.streaming",
    "weft.costs.contention": "weft_map.pccs_fit",
    "weft.costs.host_contention": "weft_map.memory_contention",
    "weft.kernels.soc": "weft_map.kernels.soc",
    "weft.kernels.soc_bound": "weft_map.kernels.soc",
    "weft.kernels.soc_delays": "weft_map.kernels.soc",
    "weft.kernels.soc_search": "weft_map.kernels.soc_search",
    "weft.kernels.contention": "weft_map.kernels.soc",
    "weft.kernels.cluster_loop": "weft_cluster.kernels.cluster_loop",
    "weft.kernels.cluster_state": "weft_cluster.kernels.cluster_loop",
    "weft.kernels.routing_rules": "weft_cluster.kernels.routing_rules",
    "weft.kernels.numbers": "weft_tune.kernels",
    "weft.serving.http": "weft.http.server",
    "weft.serving.http_limits": "weft.http.limits",
    "weft.serving.http_messages": "weft.http.messages",
    "weft.serving.lingering": "weft.http.bodies",
    "weft.serving.listening": "weft.http.server",
    "weft.serving.long_bodies": "weft.http.bodies",
    "weft.serving.places": "weft.http.limits",
    "weft.serving.progress": "weft.http.bodies",
    "weft.serving.budget": "weft.http.limits",
    "weft.serving.hops": "weft.http.messages",
    "weft.serving.unpacking": "weft.http.bodies",
    "weft.serving.encoding": "weft.http.bodies",
    "weft.load.client": "weft.http.client",
    "weft.load.answers": "weft.http.client",
    "weft.cli.map": "weft_map.cli.map",
    "weft.cli.map_dynamic": "weft_map.cli.map_dynamic",
    "weft.cli.map_show": "weft_map.cli.map_show",
    "weft.cli.calibrate": "weft_map.cli.calibrate",
    "weft.cli.stitch": "weft_stitch.cli.stitch",
    "weft.cli.stitch_show": "weft_stitch.cli.stitch",
    "weft.cli.generate": "weft_stitch.cli.generate",
    "weft.cli.tune": "weft_tune.cli",
    "weft.cli.tune_show": "weft_tune.cli",
    "weft.cli.tune_target": "weft_tune.cli",
    "weft.cli.place": "weft_cluster.cli.place",
    "weft.cli.place_change": "weft_cluster.cli.place",
    "weft.cli.place_show": "weft_cluster.cli.place",
    "weft.cli.cluster": "weft_cluster.cli.cluster",
    "weft.cli.cluster_show": "weft_cluster.cli.cluster",
    "weft.cli.ray": "weft_cluster.cli.ray",
    "weft.cli.reproduce": "weft_papers.cli",
    "weft.planning.eight_bits": "weft_tune.plan_int8",
    "weft.runtime.cuda.torch_bodies": "weft_stitch.on_device.body_file",
    "weft.runtime.cuda.torch_rounds": "weft_stitch.on_device.fused_file",
    "weft.placing.rivals.alpaserve": "weft_cluster.routing.placing_run",
    "weft.placing.rivals": "weft_papers.placing_rivals",
    "weft.stitching.running.rivals": "weft_stitch.running.gpu_timing",
    "weft.load.timing": "weft.load.generator",
    "weft.planning.staging": "weft.planning.measured",
    "weft.planning.survey.gpu_shares": "weft.planning.survey.host_measurement",
    "weft.placing.alike": "weft_cluster.placing.bound",
    "weft.placing.page": "weft_cluster.placing.placement_shown",
    "weft.mapping.kernels.contention": "weft_map.kernels.soc",
    "weft.stitching.bodies.safetensors": "weft_stitch.bodies.adapters",
    "weft.stitching.unrounded": "weft_stitch.assembly",
    "weft.stitching.reading.tidying": "weft_stitch.reading.draft",
    "weft.tuning.pages.words": "weft_tune.pages.page",
    "weft.tuning.runtime_target.halves": "weft_tune.runtime_target.bench",
    "weft.tuning.runtime_target.processor": "weft_tune.runtime_target.fastest",
    "weft.tuning.search.exchange": "weft_tune.tuner",
    "weft.tuning.search.repair": "weft_tune.tuner",
    "weft.tuning.search.recovery": "weft_tune.tuner",
    "weft.runtime.onnxruntime_cpu.node_times": "weft.runtime.onnxruntime_cpu.profiler",
    "weft.runtime.onnxruntime_cpu.run_errors": "weft.runtime.onnxruntime_cpu.sessions",
    "weft.runtime.onnxruntime_cpu.samples": "weft.runtime.samples",
    "weft.runtime.archive": "weft.runtime.samples",
    "weft.tuning.quantised.feeding": "weft.runtime.samples",
    "weft.stitching.running.clock": "weft_stitch.running.gpu_timing",
    "weft.tuning.quantised.run_times": "weft_tune.quantised.scoring",
    "weft.tuning.quantised.exported": "weft_tune.quantised.scoring",
    "weft.tuning.runtime_target.answers": "weft_tune.quantised.scoring",
    "weft.tuning.runtime_target.scoring": "weft_tune.quantised.scoring",
    "weft.tuning.runtime_target.timing": "weft.runtime.timing",
    "weft.tuning.quantised.likeness": "weft_tune.quantised.metrics",
    "weft.tuning.quantised.plan": "weft_tune.quantised.runner",
    "weft.tuning.search.bias": "weft_tune.tuner",
    "weft.numbers.twos_complement": "weft_tune.numbers.format",
    "weft.stitching.planning.signatures": "weft_stitch.graph",
    "weft.stitching.parts": "weft_stitch.family",
    "weft.stitching.metadata": "weft_stitch.file_description",
    "weft.runtime.isolated.socket_reader": "weft.runtime.isolated.lane",
    "weft.runtime.isolated.lane_line": "weft.runtime.isolated.lane",
    "weft.tuning.quantised.worker": "weft_tune.quantised.workers",
    "weft.runtime.isolated.opening": "weft.runtime.isolated",
    "weft.planning.across": "weft_cluster.plan_across",
    "weft.cli.fetch": "weft.cli.models",
    "weft.cli.plans": "weft.cli.command",
    "weft.cli.requests": "weft.cli.simulate",
    "weft.cli.unused": "weft.cli.command",
    "weft.load.reading": "weft.load.report",
    "weft.load.samples": "weft.load.payload",
    "weft.reports.html": "weft.reports.trace_exports",
    "weft.reports.occupancy": "weft.reports.trace",
    "weft.reports.perfetto": "weft.reports.trace_exports",
    "weft.models.onnx_import.fold": "weft.models.onnx_import.infer",
    "weft.models.onnx_import.defaults": "weft.models.onnx_import.infer",
    "weft.models.onnx_import.fusion": "weft.models.onnx_import.walk",
    "weft.models.equal_weights": "weft.planning.reasons",
    "weft.models.weighted_layers": "weft_tune.weighted_layers",
    "weft.models.zoo.inception4": "weft.models.zoo.inception",
    "weft.models.zoo.residual": "weft.models.zoo.vision",
    "weft.models.zoo.recommendation": "weft.models.zoo.language",
    "weft.runtime.wire_format": "weft.runtime.metadata",
    "weft.runtime.model_kinds": "weft.runtime.metadata",
    "weft.runtime.isolated.memory": "weft.runtime.isolated.packets",
    "weft.runtime.isolated.template": "weft.runtime.isolated.worker",
    "weft.runtime.isolated.kill_timer": "weft.runtime.isolated.backend",
    "weft.runtime.isolated.devices": "weft.runtime.isolated.device",
    "weft.runtime.onnxruntime_cpu.memory_limit": "weft.runtime.onnxruntime_cpu.sessions",
    "weft.runtime.onnxruntime_cpu.texts": "weft.runtime.onnxruntime_cpu.model",
    "weft.runtime.onnxruntime_cpu.scratch": "weft.runtime.onnxruntime_cpu.lane",
    "weft.runtime.isolated.engines": "weft.runtime.device_kinds",
    "weft.devices.seen_speeds": "weft.devices.shares",
    "weft.workloads.azure": "weft_cluster.routing.traces",
    "weft.workloads.traces": "weft_cluster.routing.traces",
    "weft.workloads.traffic": "weft_cluster.routing.traffic",
    "weft.cli.traffic": "weft_cluster.cli.traffic",
    "weft.workloads.saturated": "weft.workloads",
    "weft.devices.costs.systolic": "weft.devices.costs",
    "weft.numbers.spelling": "weft_tune.numbers.format",
    "weft.numbers.rounding": "weft_tune.numbers.plain",
    "weft.numbers.packing": "weft_tune.numbers.arrays",
    "weft.tuning.baselines.ristretto": "weft_tune.baselines",
    "weft.tuning.baselines.stripes": "weft_tune.baselines",
    "weft.tuning.baselines.base": "weft_tune.baselines",
    "weft.tuning.callable_evaluator": "weft_tune.evaluation",
    "weft.tuning.ranking": "weft_tune.judge",
    "weft.tuning.moves": "weft_tune.search_space",
    "weft.tuning.on_device": "weft_tune.hardware",
    "weft.tuning.geometry": "weft_tune.hardware",
    "weft.tuning.speed": "weft_tune.hardware",
    "weft.tuning.search.coarse": "weft_tune.tuner",
    "weft.tuning.search.fine": "weft_tune.tuner",
    "weft.tuning.search": "weft_tune.tuner",
    "weft.tuning.export.opsets": "weft_tune.export.emitter",
    "weft.tuning.export.types": "weft_tune.export.emitter",
    "weft.tuning.export.qonnx": "weft_tune.export.tensors",
    "weft.tuning.export.sites": "weft_tune.export",
    "weft.tuning.runtime_target.ranges": "weft_tune.runtime_target.prepared",
    "weft.tuning.runtime_target.int8_tensors": "weft_tune.runtime_target.qdq",
    "weft.tuning.runtime_target.layer_times": "weft_tune.runtime_target.bench",
    "weft.tuning.runtime_target.result": "weft_tune.runtime_target.fastest",
    "weft.tuning.quantised.cache": "weft_tune.quantised.runner",
    "weft.tuning.quantised.stages": "weft_tune.quantised.opened",
    "weft.tuning.quantised.int8": "weft_tune.quantised.scoring",
    "weft.tuning.pages.tables": "weft_tune.pages.page",
    "weft.tuning.cli.tune_target": "weft_tune.cli",
    "weft.tuning.trials": "weft_tune.result",
    "weft.mapping.baselines.heft": "weft_map.baselines.published",
    "weft.mapping.baselines.herald": "weft_map.baselines.published",
    "weft.mapping.baselines.mensa": "weft_map.baselines.published",
    "weft.mapping.baselines.h2h": "weft_map.baselines.published",
    "weft.mapping.baselines.naive": "weft_map.baselines",
    "weft.mapping.baselines.blind": "weft_map.baselines",
    "weft.mapping.switches": "weft_map.limits",
    "weft.mapping.planner_worker": "weft_map.background_planner",
    "weft.mapping.grouping": "weft_map.estimate",
    "weft.numbers.loops": "weft_tune.numbers.arrays",
    "weft.tuning.database": "weft_tune.evaluation",
    "weft.tuning.descriptor": "weft_tune.subject",
    "weft.tuning.export.weights": "weft_tune.export.tensors",
    "weft.tuning.export.activations": "weft_tune.export.tensors",
    "weft.tuning.quantised.targets": "weft_tune.quantised.opened",
    "weft.stitching.discovery.nearness": "weft_stitch.discovery.matching",
    "weft.mapping.executor": "weft_map.simulator",
    "weft.stitching.forms.fused": "weft_stitch.forms.whole",
    "weft.tuning.exhaustive": "weft_tune.baselines",
    "weft.stitching.planning.cost": "weft_stitch.cost",
    "weft.stitching.counts": "weft_stitch.cost",
    "weft.stitching.running.fused": "weft_stitch.running.module",
}
"""Old path of a module or package -> new path; the contents of a package moved with it."""


_CORE_PACKAGES = frozenset(
    path.name for path in Path(__file__).parents[1].iterdir() if (path / "__init__.py").is_file()
)
"""Packages of the core, for which the registry need not be read.

A folder counts only with an ``__init__.py``: a folder that an update left behind may still hold compiled files.
"""


def new_name(name: str) -> tuple[str, bool] | None:
    """Return the new path of a moved module, and whether its old path is documented; None for all other modules."""
    package, _, rest = name.partition(".")
    if package != "weft" or not rest:
        return None
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        prefix, rest_of_path = ".".join(parts[:count]), parts[count:]
        if prefix in MOVED:
            return ".".join((MOVED[prefix], *rest_of_path)), False
    if parts[1] in _CORE_PACKAGES:
        return None
    from weft.base.registry import registered

    entry = registered("modules").get(parts[1])
    return (".".join((entry.target, *parts[2:])), True) if entry else None


class _MovedModules(MetaPathFinder, Loader):
    """Import hook for old paths.

    It must come first in ``sys.meta_path``: the default finder would load the files of a moved package a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith("weft.") and new_name(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        target = new_name(module.__name__)
        assert target is not None
        name, documented = target
        if not documented:
            warnings.warn(
                f"{module.__name__} is {name} now; the old name ends with 0.4", DeprecationWarning, stacklevel=2
            )
        sys.modules[module.__name__] = import_module(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module at its new path, for ``python -m``."""
        target = new_name(fullname)
        spec = find_spec(target[0]) if target else None
        return spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None


def install() -> None:
    """Install the import hook."""
    sys.meta_path.insert(0, _MovedModules())
