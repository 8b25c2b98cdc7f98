"""``weft serve``: models as a server that keeps deadlines."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from weft.base.errors import InputError, WeftError
from weft.base.registry import others, use_own_tools
from weft.cli.common import (
    PolicyOptions,
    Shapes,
    complete_policies,
    how,
    in_panel,
    parse_bytes,
    parse_options,
    what,
)
from weft.cli.plans import arguments_of, told_in_options
from weft.cli.printing import add_row, console, counted, plain_table, say
from weft.cli.unused import refuse_unused

if TYPE_CHECKING:
    from weft.runtime.backend import LoadedModel
    from weft.serving.config import ServerConfig
    from weft.serving.server import Server
    from weft.serving.service import Service
    from weft.serving.slots import ModelSlot

log = logging.getLogger("weft.tools")

machine, network = in_panel("Machine"), in_panel("Network")
"""Options that say what of this machine the server uses, and how clients reach it and what is told of them."""


def command(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODELS]...",
            help="A plan (weft plan); or model repositories (NAME/VERSION/model.onnx, NAME.onnx), files, known names.",
        ),
    ] = None,
    config: Annotated[str | None, what("--config", help="A TOML file with all settings.")] = None,
    shape: Shapes = None,
    check: Annotated[
        bool, how("--check", help="Load, report and end without listening: 0 if it would be ready, else 2.")
    ] = False,
    unchecked: Annotated[
        bool, how("--unchecked", help="Serve a plan although its models are not those it was written with.")
    ] = False,
    no_tools: Annotated[
        bool, how("--no-tools", help="Load no tools of other people (weft tools lists them); so does WEFT_TOOLS=own.")
    ] = False,
    ready_when: Annotated[
        str | None, how(show_default="all", help="Ready when all preloaded models can be used, or any of them.")
    ] = None,
    preload: Annotated[
        bool | None,
        how("--preload/--no-preload", show_default="preload", help="Load models at the start, or when asked for."),
    ] = None,
    wait_for_models: Annotated[
        bool | None,
        how(
            "--wait-for-models/--no-wait",
            show_default="no-wait",
            help="Stay with no model that can be served; models come later.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        how(
            "--policy",
            "-p",
            autocompletion=complete_policies,
            show_default="punctual",
            help="Who goes next: punctual, edf, fifo...",
        ),
    ] = None,
    option: PolicyOptions = None,
    late: Annotated[
        str | None, how(show_default="weave", help="weave, keep or demote soft requests that are late.")
    ] = None,
    lanes: Annotated[int | None, machine(show_default="cores less one", help="Segments computed at a time.")] = None,
    threads: Annotated[int | None, machine(show_default="1", help="Threads that compute one segment.")] = None,
    backend: Annotated[
        str | None, machine(show_default="onnxruntime", help="What runs the models: onnxruntime, or one installed.")
    ] = None,
    device: Annotated[
        str | None, machine(show_default="the cores", help="GPUs that run the models, as cuda:0 (docs/gpu.md).")
    ] = None,
    precision: Annotated[
        str | None, machine(show_default="fp32", help="What the device computes with: fp32, fp16 or bf16.")
    ] = None,
    allow_programs: Annotated[
        bool | None,
        machine(
            "--allow-programs/--no-programs",
            show_default="no-programs",
            help="Load programs of torch (.pt2), which may run code of theirs.",
        ),
    ] = None,
    device_memory: Annotated[
        str | None, machine(show_default="no limit", help="Of the device, for loaded models together, as 20g.")
    ] = None,
    isolation: Annotated[
        str | None,
        machine(show_default="threads", help="Where models run: threads, process (a worker each) or group:NAME (one)."),
    ] = None,
    worker_memory: Annotated[
        str | None, machine(show_default="no limit", help="For each worker process, as 2g.")
    ] = None,
    pin: Annotated[
        bool | None, machine("--pin/--no-pin", show_default="no-pin", help="Keep every lane on a core of its own.")
    ] = None,
    host: Annotated[str | None, network(show_default="127.0.0.1", help="Address to listen on.")] = None,
    http_port: Annotated[int | None, network(show_default="8000", help="0 lets the system choose.")] = None,
    grpc_port: Annotated[
        int | None, network(show_default="8001", help="0 lets the system choose, -1 is no gRPC.")
    ] = None,
    memory_budget: Annotated[
        str | None, machine(show_default="no limit", help="For loaded models together, as 2g.")
    ] = None,
    default_slo_ms: Annotated[
        float | None, how(show_default="1000", help="How soon requests without a deadline are due.")
    ] = None,
    max_body: Annotated[str | None, network(show_default="256m", help="Largest request, as 64m.")] = None,
    max_json: Annotated[str | None, network(show_default="64m", help="Largest JSON of a request, as 16m.")] = None,
    max_inflight: Annotated[
        str | None, network(show_default="1g", help="Bodies and unread answers held together, as 512m.")
    ] = None,
    read_s: Annotated[
        float | None, network(show_default="30", help="How long the head of a request may take, and a body may stand.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        network(show_default="this machine's, on loopback", help="A name it may be asked under; may be repeated."),
    ] = None,
    api_key_file: Annotated[str | None, network(help="Requests must carry its key; or set WEFT_API_KEY.")] = None,
    keys_file: Annotated[str | None, network(help="Keys with names and quotas (TOML), read when it changes.")] = None,
    repository: Annotated[
        str | None, network(show_default="open", help="read-only: no client may load or unload models.")
    ] = None,
    live_settings: Annotated[
        str | None, network(show_default="open", help="read-only: no client may change log and trace settings.")
    ] = None,
    shared_memory: Annotated[
        bool | None,
        network(
            "--shared-memory/--no-shared-memory",
            show_default="on loopback only",
            help="Let clients put tensors in shared memory.",
        ),
    ] = None,
    tls_cert: Annotated[str | None, network(help="Certificate chain (PEM); with --tls-key.")] = None,
    tls_key: Annotated[str | None, network(help="Its private key.")] = None,
    cache: Annotated[
        str | None, machine(show_default="nowhere", help="Where cut models are kept between starts.")
    ] = None,
    drain_s: Annotated[float | None, how(show_default="30", help="How long to finish when told to stop.")] = None,
    access_log: Annotated[
        bool | None, network("--access-log/--no-access-log", show_default="no-access-log", help="A line per request.")
    ] = None,
    otlp: Annotated[str | None, network(help="Send OpenTelemetry spans here, as http://localhost:4318.")] = None,
    learn_s: Annotated[
        float | None, machine(show_default="60", help="How long a model may be tried out to cut it; 0 leaves it whole.")
    ] = None,
    learn_first: Annotated[
        bool | None,
        machine("--learn-first/--learn-later", show_default="learn-later", help="Cut models before they are served."),
    ] = None,
    max_compute_s: Annotated[
        float | None, how(show_default="60", help="How long a request without a strict deadline may be computed.")
    ] = None,
) -> None:
    """Serve ONNX models over the Open Inference Protocol (REST and gRPC), and keep deadlines.

    Models are cut into short segments, and between segments the policy decides again who goes next.
    A dashboard is at [bold]/[/bold], Prometheus metrics at [bold]/metrics[/bold].
    Every setting is a variable too, as WEFT_LANES=2, which goes before a file and after an option.
    """
    import asyncio

    from weft.serving.config import ServerConfig
    from weft.serving.ending import leave, leave_if_stuck
    from weft.serving.environment import near_misses
    from weft.serving.log_settings import FORMAT
    from weft.serving.server import fastest_loop, serve

    if no_tools:
        use_own_tools()
    plan = _plan_among(sources or [], config)
    if plan is None:
        refuse_unused(context, "models without a plan", {"unchecked": "name a plan"})
    else:
        refuse_unused(context, "a plan", {"shape": "it is for the shapes it was planned with; plan for others"})
    given = arguments_of(ServerConfig, context) | {
        "models": tuple(sources) if sources and plan is None else None,
        "policy_options": parse_options(option) or None,
        "memory_budget_bytes": parse_bytes("--memory-budget", memory_budget),
        "worker_memory_bytes": parse_bytes("--worker-memory", worker_memory),
        "device_memory_bytes": parse_bytes("--device-memory", device_memory),
        "max_body_bytes": parse_bytes("--max-body", max_body),
        "max_json_bytes": parse_bytes("--max-json", max_json),
        "max_inflight_bytes": parse_bytes("--max-inflight", max_inflight),
        "shapes": tuple(shape) if shape else None,
        "allowed_hosts": tuple(allowed_host) if allowed_host else None,
    }
    typed = {key: value for key, value in given.items() if value is not None}
    read = partial(_settings, config, typed, api_key_file, plan, unchecked=unchecked)
    with told_in_options(context) if plan else nullcontext():
        settings = read()
    for told in near_misses(os.environ):
        typer.echo(f"weft: {told}", err=True)
    if check:
        _check(settings)
        return
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    for tool in others():
        log.info("tool %s of package %s is loaded; --no-tools leaves it out", tool.name, tool.package)
    for warning in settings.warnings:
        typer.echo(f"weft: {warning}", err=True)
    again, own = read if plan else None, context.obj is True  # the process is this command's alone
    with _Loading() as loading, asyncio.Runner(loop_factory=fastest_loop()) as runner:
        done = runner.run(serve(settings, loading.say, loading.started, _finishing, again, to_the_end=own))
    lost = WeftError("stopped before every request was answered in full")
    (leave if own else leave_if_stuck)(0 if done else 1, "" if done else f"weft: {lost}")
    if not done:
        raise lost


def _plan_among(sources: list[str], config: str | None) -> str | None:
    """The plan that shall be served, if one is named; it brings its models and its settings, so it goes alone."""
    from weft.planning.layout import is_plan

    plan = next((each for each in sources if is_plan(each)), None)
    if plan is not None and (len(sources) > 1 or config):
        other = config or next(each for each in sources if each != plan)
        raise InputError(f"{plan} is a plan, with models and settings of its own; leave out {other}, or serve it apart")
    return plan


def _settings(
    file: str | None,
    given: dict[str, Any],
    api_key_file: str | None,
    plan: str | None = None,
    *,
    unchecked: bool = False,
) -> ServerConfig:
    """The settings of the file or the plan, in their place the environment's, and over both the typed ones."""
    from weft.serving.config import ServerConfig, read_api_key, read_server_config
    from weft.serving.environment import settings_in

    if given.get("grpc_port") == -1:
        given["grpc_port"] = None
    if api_key_file:
        given["api_key"] = read_api_key(Path(api_key_file), {})
    if plan is not None:
        from weft.planning.folder import plan_settings

        base = plan_settings(plan, unchecked=unchecked)
    else:
        base = read_server_config(Path(file)) if file else ServerConfig(api_key=read_api_key(None, os.environ))
    around = settings_in(os.environ)
    if plan is not None:  # it brings its models
        around.pop("models", None)
    settings = replace(base, **around | given)
    if not settings.models:
        raise InputError("nothing to serve: name a model repository, an .onnx file or a model (weft models list)")
    return settings


class _Loading:
    """Tells which model is being loaded: on a terminal as a line that moves and goes, elsewhere as a line each."""

    def __init__(self) -> None:
        self._status = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> _Loading:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done()

    def say(self, name: str) -> None:
        if self._status:
            self._status.update(f"loading {escape(name)}: it is cut and measured while it is served")
        else:
            say(f"loading {name}")

    def started(self, server: Server) -> None:
        self.done()
        _announce(server)

    def done(self) -> None:
        """Take the moving line away."""
        if self._status:
            self._status.stop()


def _check(settings: ServerConfig) -> None:
    """Load what a server would, show it, and refuse if the server would not be ready."""
    import asyncio

    from weft.serving.server import Server, fastest_loop

    logging.basicConfig(level=logging.ERROR)  # what is wrong with a model stands in the table
    missing = ""
    with _Loading() as loading, asyncio.Runner(loop_factory=fastest_loop()) as runner:

        def report(service: Service) -> None:
            nonlocal missing
            loading.done()
            _print_models(service)
            missing = service.why_not_ready()

        async def run() -> None:
            await Server(settings).check(loading.say, report)

        runner.run(run())
    if missing:
        raise InputError(f"not ready: {missing}")
    console.print("ready")


def _print_models(service: Service) -> None:
    """Every model there is or should be, with its state and what is to be said about it."""
    table = plain_table("", ("model", "version", "state", ""), left=4)
    slots = list(service.library.slots())
    for slot in slots:
        state, said = _told(slot, service.library.why_unusable(slot))
        add_row(table, slot.entry.name, slot.entry.version, state, said)
    repository, known = service.library.repository, {slot.entry.name for slot in slots}
    for name, why in repository.problems.items():
        add_row(table, name, "", "problem" if name in known else "failed", why)
    for name, remark in repository.remarks.items():
        add_row(table, name, "", "remark", remark)
    console.print(table)


def _told(slot: ModelSlot, why_unusable: str) -> tuple[str, str]:
    """A model's state in a word, and what is to be said about it."""
    if why_unusable:
        return "failed", why_unusable
    if slot.served is None:
        return "on demand", slot.message
    return "ready", "; ".join(filter(None, (_pieces(slot.served.loaded), slot.message)))


def _finishing(requests: int) -> None:
    say(f"finishing {counted(requests, 'request')}; Ctrl-C again to stop now")


def _announce(server: Server) -> None:
    config, service = server.config, server.service
    scheme = "https" if config.tls_cert else "http"
    address = f"{scheme}://{config.host}:{server.http_port}"
    missing = service.why_not_ready()
    console.print()
    _line(f"not ready  {address}  {missing}" if missing else f"ready  {address}")
    if missing:
        _line("           mend what is missing, then POST /v2/repository/models/NAME/load")
    if server.grpc_port:
        say(f"       grpc {config.host}:{server.grpc_port}")
    lanes = counted(len(service.dispatcher.lanes.lanes), "lane")
    say(f"       policy {config.policy}, {lanes}, stop with Ctrl-C\n")
    slots = list(service.library.slots())
    lines: dict[str, list[str]] = {}
    for slot in slots:
        pieces = _pieces(slot.served.loaded) if slot.served else slot.state
        said = f"{slot.entry.version}: {pieces}  {slot.message}"
        own = "" if slot.state == "failed" else slot.entry.name  # models of one file fail for one reason
        lines.setdefault(f"{own} {said}", []).append(slot.entry.name)
    for said, names in lines.items():
        _line(f"       {', '.join(names)} {said.partition(' ')[2]}")
    repository = service.library.repository
    for name, why in repository.problems.items():
        _line(f"       problem: {name}: {why}")
    for name, remark in repository.remarks.items():
        _line(f"       remark: {name}: {remark}")


def _pieces(loaded: LoadedModel) -> str:
    exits = ", ".join(each.output for each in loaded.exits)
    return counted(len(loaded.segments), "segment") + (f", exits {exits}" if exits else "")


def _line(text: str) -> None:
    """One line however long, and nothing in it is markup: names and reasons come from files."""
    say(text.rstrip(), soft_wrap=True)
