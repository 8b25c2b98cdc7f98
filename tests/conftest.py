"""Settings of all tests, and strain: options that make this machine look like another, which no test may notice.

``pytest --clock 10`` serves models whose segments are measured to take ten times as long, ``--clock 0.1`` a tenth;
``--disk 0.05`` makes the disk take 50 ms to confirm a write. ``make strain`` runs the suite under all of them, on one
core, and beside busy loops.

``pytest --backend process`` has every server that a test starts in its own process run its models in another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from numba.core.dispatcher import Dispatcher

# Workers share the cores: a library with a thread for each would wait for threads that do not run. Children inherit it.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Failing asserts of helpers show their values as those of tests do.
pytest.register_assert_rewrite(
    *(
        f"tests.{path.stem}"
        for path in Path(__file__).parent.iterdir()
        if path.stem != "conftest" and path.name[0] != "_"
    )
)

# The same examples in every run, so that a commit passes or fails once and for all; where a test says nothing, 25.
# To look for new ones, a hundred in each run: pytest --hypothesis-profile=explore
patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, max_examples=25, **patient)
settings.register_profile("explore", **patient)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("strain", "this machine looks like another one")
    group.addoption("--clock", type=float, default=1.0, help="segments are measured to take this many times as long")
    group.addoption("--disk", type=float, default=0.0, help="seconds the disk takes to confirm a write")
    parser.addoption("--backend", default="onnxruntime", help="what servers run models on: onnxruntime or process")


LONG = (
    "base/test_registry.py",
    "cli/test_cli.py::test_an_exported_table_model_is_streamed_like_its_description",
    "cli/test_cli.py::test_compare_gives_every_policy_the_pieces_that_weft_chose",
    "cli/test_cli.py::test_every_export_is_written_and_named",
    "cli/test_cli_map.py",
    "cli/test_cli_stitch.py",
    "cli/test_cli_tune.py",
    "cli/test_cli_unused.py::test_an_option_for_some_of_the_models_is_taken",
    "cli/test_command_line.py::test_what_is_asked_for_is_compiled_once_and_said",
    "costs/test_explore.py",
    "devices/test_host_device.py::test_a_real_model_is_measured_under_its_server_and_served_by_the_simulator",
    "engine/test_trial.py",
    "kernels/test_host_loop.py::test_the_loop_is_right_as_it_is_written",
    "kernels/test_kernels.py",
    "kernels/test_refill.py",
    "kernels/test_request_loop.py::test_the_loop_is_right_with_the_jit_off",
    "kernels/test_rules.py",
    "load/test_bench_samples.py",
    "mapping/test_baselines.py",
    "mapping/test_cpsat.py",
    "mapping/test_dynamic.py",
    "mapping/test_soc_problem.py::test_an_energy_budget_no_schedule_keeps_says_by_how_much",
    "mapping/test_soc_simulator.py",
    "mapping/test_solver.py",
    "models/test_onnx_exporters.py",
    "models/test_zoo.py",
    "numbers/test_oracles.py",
    "numbers/test_rounding.py::test_the_loops_are_right_with_the_jit_off",
    "papers/",
    "placing/test_placement.py::test_where_no_machine_was_judged_alone_none_is_called_the_worst",
    "planning/test_plan_device.py",
    "planning/test_serve_plan.py",
    "policies/test_fairness.py",
    "policies/test_on_shares.py",
    "policies/test_top_up.py",
    "reports/test_mapping_page.py",
    "reports/test_timeline_exports.py",
    "runtime/cuda/test_body_models.py",
    "runtime/cuda/test_fused_models.py",
    "runtime/cuda/test_programs.py",
    "runtime/cuda/test_stitched_models.py",
    "runtime/test_prepared.py",
    "runtime/test_special_models.py",
    "serving/test_lingering.py",
    "serving/test_openapi_properties.py",
    "serving/test_serve_bodies.py",
    "serving/test_serve_endless.py",
    "serving/test_serve_life.py::test_memory_returns_with_an_unload",
    "serving/test_serve_models.py",
    "serving/test_serve_overrun.py",
    "serving/test_serve_promises.py",
    "serving/test_serve_shares.py",
    "serving/test_serve_stitched.py",
    "serving/test_serve_stitched_device.py",
    "serving/test_soak.py",
    "serving/test_telemetry.py",
    "simulation/test_queueing_theory.py",
    "stitching/test_assembly.py",
    "stitching/test_bodies.py",
    "stitching/test_bodies_adapters.py",
    "stitching/test_bodies_near.py",
    "stitching/test_bodies_pictures.py",
    "stitching/test_bodies_torch.py",
    "stitching/test_bodies_trained.py",
    "stitching/test_body_serving.py",
    "stitching/test_clock.py",
    "stitching/test_described.py",
    "stitching/test_discovery.py",
    "stitching/test_forms.py",
    "stitching/test_fused.py",
    "stitching/test_fused_body.py",
    "stitching/test_generator.py",
    "stitching/test_islands.py",
    "stitching/test_planner.py",
    "stitching/test_random.py",
    "stitching/test_rivals.py",
    "stitching/test_torch_module.py",
    "stitching/test_zipping.py",
    "test_arrows.py",
    "test_examples.py::test_the_early_exits_of_the_page_are_served_measured_and_simulated",
    "test_installed.py::test_it_weaves_models",
    "tuning/test_device.py",
    "tuning/test_exhaustive.py",
    "tuning/test_export.py",
    "tuning/test_export_activations.py",
    "tuning/test_onnx_workers.py",
    "tuning/test_tuner.py",
)
"""Folders, files and tests that take long: papers reproduced, comparisons with other programs, many random cases."""


TESTS = Path(__file__).parent
USES_LOOPS = frozenset(
    ("cli", "cluster", "devices", "engine", "kernels", "placing", "planning", "policies", "reports", "simulation")
)
"""Rooms whose tests run last, because many of them simulate requests: the loops for it are compiled meanwhile."""
COMPILER = pytest.StashKey[subprocess.Popen[bytes]]()


def _is_long(path: Path) -> bool:
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix().startswith(LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: tests of servers and processes wait for these, and a core would be idle meanwhile."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the long ones their files are not even imported: a third of all tests."""
    return True if config.option.markexpr == "not long" and _is_long(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(LONG):
            item.add_marker("long")
    # loops of requests are compiled meanwhile (tests.loops)
    items.sort(key=lambda item: item.path.parent == TESTS or item.path.relative_to(TESTS).parts[0] in USES_LOOPS)


def pytest_collection(session: pytest.Session) -> None:
    """Garbage is not looked for while tests are collected: there is little, and each look takes longer."""
    gc.disable()
    if _runs_all(session.config):
        _share_compiling(session.config)


def _runs_all(config: pytest.Config) -> bool:
    return [Path(path).absolute() for path in config.args] == [TESTS]


def _share_compiling(config: pytest.Config) -> None:
    """Import the files of the tests, each worker from another one on: in a fresh checkout each compiles its part.

    Else all would compile all of them, and what they import, at the same time, which takes longest of collecting.
    """
    # before triton is imported: its kernels then run as Python, without a GPU, as the tests of kernels need it
    os.environ["TRITON_INTERPRET"] = "1"
    here, worker = Path(__file__).parent, getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    files = sorted(path for path in here.rglob("test_*.py") if not pytest_ignore_collect(path, config))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in files[first:]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says what is wrong
            import_module(".".join(path.relative_to(here.parent).with_suffix("").parts))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        compile_once_among_processes()
    elif getattr(config.option, "numprocesses", None) and _runs_all(config):
        command = [sys.executable, "-m", "tests.loops"]
        config.stash[COMPILER] = subprocess.Popen(command, cwd=config.rootpath, stdout=DEVNULL)


def pytest_unconfigure(config: pytest.Config) -> None:
    if compiler := config.stash.get(COMPILER, None):
        compiler.kill()
        compiler.wait()


def compile_once_among_processes() -> None:
    """Let only one process at a time compile a kernel; the others wait, and read what it kept.

    In a fresh checkout each worker would compile the loops that all of them use: 46 s of a processor for one of them.
    """
    compile_here, within = Dispatcher.compile, threading.local()

    def compile_once(kernel: Any, signature: Any) -> Any:
        if getattr(within, "compiling", False):  # what a kernel calls is compiled as a part of it
            return compile_here(kernel, signature)
        with Path(kernel.py_func.__code__.co_filename).open() as source:
            fcntl.flock(source, fcntl.LOCK_EX)
            within.compiling = True
            try:
                return compile_here(kernel, signature)
            finally:
                within.compiling = False

    Dispatcher.compile = compile_once


def pytest_collection_finish() -> None:
    """What is there before the first test stays: to look through all of it takes a third of a second each time.

    Looks for what tests leave are far apart; they took 2 to 3 % of the time of tests that make many objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def patient_command_line() -> None:
    """Commands that tests run say nothing of their progress, however slow the machine, nor of what is compiled.

    The options of all commands are built once, not anew for each call, which takes longer than to refuse one.
    """
    import typer.main

    from weft.cli import printing

    printing.QUIET_S = threading.TIMEOUT_MAX
    logging.getLogger("weft.kernels").addHandler(logging.NullHandler())
    typer.main.get_command = cache(typer.main.get_command)


@pytest.fixture(scope="session", autouse=True)
def chosen_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers of the tests know the backend in another process, and run on the one that was asked for."""
    from tests.registering import register
    from tests.serving import live

    with pytest.MonkeyPatch.context() as patch:
        register(patch, "backends", "process", "tests.runtime.process_backend:open_backend")
        patch.setattr(live, "BACKEND", request.config.getoption("--backend"))
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium with one page."""
    from tests.support.browser import Browser

    with contextlib.closing(Browser(tmp_path_factory.mktemp("chromium"))) as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def strain(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put on what the options say; nothing without them."""
    factor, delay_s = request.config.getoption("--clock"), request.config.getoption("--disk")
    with pytest.MonkeyPatch.context() as patch:
        if factor != 1.0:
            _other_speed(patch, factor)
        if delay_s > 0:
            patch.setattr(os, "fsync", _slow(os.fsync, delay_s))
        yield


def _other_speed(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Models are cut, measured and expected to run as on a machine of that speed."""
    from weft.runtime.onnxruntime_cpu import preparing

    clock, profile = preparing.clock_for, preparing.profile

    def scaled_clock(threads: int) -> Callable[[], float]:
        inner = clock(threads)
        return lambda: inner() * factor

    def scaled_profile(*args: Any) -> Any:
        found = profile(*args)
        return replace(found, times_s=tuple(each * factor for each in found.times_s))

    patch.setattr(preparing, "clock_for", scaled_clock)
    patch.setattr(preparing, "profile", scaled_profile)


def _slow(fsync: Callable[[int], None], delay_s: float) -> Callable[[int], None]:
    def slow(file: int) -> None:
        time.sleep(delay_s)
        fsync(file)

    return slow
