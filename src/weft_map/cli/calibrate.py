"""``weft map calibrate``: how much the cores of this machine, or a measured unit, lose to others at the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.common import how
from weft.cli.printing import (
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    say_written,
    write_result,
)

if TYPE_CHECKING:
    from weft.devices import Soc
    from weft_map.pccs_fit import Fit, Matrix


def command(
    quick: Annotated[bool, how("--quick", help="A first look of about 3 s instead of 20.")] = False,
    matrix_file: Annotated[
        str | None, how("--matrix", help="Fit this JSON matrix instead of measuring this machine.")
    ] = None,
    toml: common.DeviceFile = None,
    json_file: common.JsonFile = None,
) -> None:
    """Measure the memory contention between the cores of this machine, and fit the PCCS model to it."""
    from weft.base.files import write_text
    from weft.devices import soc_as_toml
    from weft_map.pccs_fit import calibration_as_dict, fit_matrix, read_matrix

    if quick and matrix_file:
        raise InputError("--quick measures and --matrix does not; give one of them")
    matrix = read_matrix(matrix_file) if matrix_file else _measure(quick)
    fit = fit_matrix(matrix)
    _print_fit(matrix, fit)
    if json_file or toml:
        device = _device(matrix, fit, measured=matrix_file is None)
        write_result(json_file, calibration_as_dict(matrix, fit, device))
    if toml:
        write_text(toml, soc_as_toml(device))
        say_written("device", toml, "for weft map --soc")


def _measure(quick: bool) -> Matrix:
    """Measure this machine, with a progress bar."""
    from weft_map.memory_contention import LEVELS, QUICK_LEVELS, QUICK_S, SECONDS, measure_host

    with progress_bar("measuring", 1) as advance:
        return measure_host(
            levels=QUICK_LEVELS if quick else LEVELS,
            seconds=QUICK_S if quick else SECONDS,
            on_progress=lambda done, of: advance(None, done, of),
        )


def _device(matrix: Matrix, fit: Fit, *, measured: bool) -> Soc:
    """The device to write; measured: the matrix is of this machine, so its cores and their speed are known, too."""
    from weft_map.memory_contention import core_tflops, host_soc, physical_cores

    if measured:
        return host_soc(matrix, fit, instances=min(16, len(physical_cores())), peak_tflops=core_tflops())
    return host_soc(matrix, fit, name="calibrated", unit="unit")


def _print_fit(matrix: Matrix, fit: Fit) -> None:
    """Print the matrix as relative speeds, and the fitted parameters if there is contention."""
    columns = ("own GB/s", *(number(level, 1) for level in matrix.external_gb_s))
    table = plain_table("relative speed in %, by own demand and that of others (GB/s)", columns)
    for own, speeds in zip(matrix.own_gb_s, matrix.relative_speed_pct, strict=True):
        add_row(table, number(own, 1), *(number(speed, 1) for speed in speeds))
    console.print(table)
    if matrix.source:
        say(matrix.source)
    console.print()
    if not fit.contended:
        say(
            f"no contention: {max(0.0, fit.lost_pct):.1f} % is lost to others, within the noise of "
            f"{fit.noise_pct:.1f} %; no parameters to fit"
        )
        return
    _print_parameters(fit)


def _print_parameters(fit: Fit) -> None:
    table = plain_table("PCCS parameters", ("parameter", "five steps", "refined"))
    start, refined = fit.start.model_dump(exclude={"model"}), fit.model.model_dump(exclude={"model"})
    for name, value in refined.items():
        add_row(table, name, number(start[name], 3), number(value, 3))
    add_row(table, "mean error, points", number(fit.start_error_points, 2), number(fit.mean_error_points, 2))
    console.print(table)
