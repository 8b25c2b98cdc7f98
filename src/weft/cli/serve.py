"""``weft serve``: runs the server, and prints its models and its state."""

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
from weft.cli.command import name_options_in_errors, refuse_unused
from weft.cli.common import how, parse_options, what
from weft.cli.printing import add_row, console, counted, plain_table, say
from weft.cli.settings import From, Typed, with_settings
from weft.serving.config import GROUPS, ServerConfig, read_api_key, read_server_config

if TYPE_CHECKING:
    from weft.runtime.backend import LoadedModel
    from weft.serving.server import Server
    from weft.serving.service import Service
    from weft.serving.slots import ModelSlot

log = logging.getLogger("weft.tools")

HELP_ORDER = [
    GROUPS[name] for name in ("execution", "workers", "scheduling", "network", "limits", "telemetry", "loading")
]
"""The groups of settings in the order in which the help lists their options."""


def _grpc_port(port: int) -> int | None:
    """Return the setting for the option ``--grpc-port``, where -1 means no gRPC."""
    return None if port == -1 else port


@with_settings
def command(
    context: typer.Context,
    *,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODELS]...",
            help="A plan (weft plan); or model repositories (NAME/VERSION/model.onnx, NAME.onnx), files, known names.",
        ),
    ] = None,
    config: Annotated[str | None, what("--config", help="A TOML file with all settings.")] = None,
    check: Annotated[
        bool,
        how(
            "--check",
            help="Load the models, report, and exit without listening: 0 if the server would be ready, else 2.",
        ),
    ] = False,
    unchecked: Annotated[bool, how("--unchecked", help="Serve a plan although its model files have changed.")] = False,
    no_tools: Annotated[
        bool, how("--no-tools", help="Load no third-party tools (weft tools lists them); so does WEFT_TOOLS=own.")
    ] = False,
    typed: Annotated[Typed, From(*HELP_ORDER, policy_options=parse_options, grpc_port=_grpc_port)],
    api_key_file: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Network", help="A file with the key that requests must carry; or set WEFT_API_KEY."
        ),
    ] = None,
) -> None:
    """Serve ONNX models over the Open Inference Protocol (REST and gRPC), with deadlines.

    Models are cut into short segments, and between segments the policy decides again what runs next.
    A dashboard is at [bold]/[/bold], Prometheus metrics at [bold]/metrics[/bold].
    Every setting is also a variable, as WEFT_LANES=2. Options override variables, and variables override a file.
    """
    import asyncio

    from weft.serving.client_settings import FORMAT
    from weft.serving.environment import near_misses
    from weft.serving.process import end_with_stdin, leave, leave_if_stuck
    from weft.serving.server import fastest_loop, serve

    end_with_stdin()
    if no_tools:
        use_own_tools()
    plan = _plan_among(sources or [], config)
    if plan is None:
        refuse_unused(context, "models without a plan", {"unchecked": "name a plan"})
    else:
        refuse_unused(context, "a plan", {"shapes": "it is for the shapes it was planned with; plan for others"})
    options = dict(typed) | ({"models": tuple(sources)} if sources and plan is None else {})
    read_settings = partial(_settings, config, options, api_key_file, plan, unchecked=unchecked)
    with name_options_in_errors(context) if plan else nullcontext():
        settings = read_settings()
    for warning in near_misses(os.environ):
        typer.echo(f"weft: {warning}", err=True)
    if check:
        _check(settings)
        return
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    for tool in others():
        log.info("tool %s of package %s is loaded; --no-tools leaves it out", tool.name, tool.package)
    for warning in settings.warnings:
        typer.echo(f"weft: {warning}", err=True)
    read_again = read_settings if plan else None
    only_command = context.obj is True  # not called as a function of a longer program
    with _Loading() as loading, asyncio.Runner(loop_factory=fastest_loop()) as runner:
        all_answered = runner.run(
            serve(settings, loading.say, loading.started, _finishing, read_again, to_the_end=only_command)
        )
    error = WeftError("stopped before every request was answered in full")
    (leave if only_command else leave_if_stuck)(0 if all_answered else 1, "" if all_answered else f"weft: {error}")
    if not all_answered:
        raise error


def _plan_among(sources: list[str], config: str | None) -> str | None:
    """Return the plan among *sources*, or None; raises InputError if other sources or a settings file are given too."""
    from weft.planning.plan import is_plan

    plan = next((source for source in sources if is_plan(source)), None)
    if plan is not None and (len(sources) > 1 or config):
        other = config or next(source for source in sources if source != plan)
        raise InputError(f"{plan} is a plan, with models and settings of its own; leave out {other}, or serve it apart")
    return plan


def _settings(
    file: str | None,
    options: dict[str, Any],
    api_key_file: str | None,
    plan: str | None = None,
    *,
    unchecked: bool = False,
) -> ServerConfig:
    """Return the settings of the file or plan, overridden by environment variables, then by *options*.

    unchecked: serve a plan although its model files have changed.
    """
    from weft.serving.environment import settings_in

    if api_key_file:
        options["api_key"] = read_api_key(Path(api_key_file), {})
    if plan is not None:
        from weft.planning.folder import plan_settings

        base = plan_settings(plan, unchecked=unchecked)
    else:
        base = read_server_config(Path(file)) if file else ServerConfig(api_key=read_api_key(None, os.environ))
    variables = settings_in(os.environ)
    if plan is not None:  # a plan has models of its own
        variables.pop("models", None)
    settings = replace(base, **variables | options)
    if not settings.loading.models:
        raise InputError("nothing to serve: name a model repository, an .onnx file or a model (weft models list)")
    return settings


class _Loading:
    """Shows the model that is being loaded: on a terminal in a status line, elsewhere as a line per model."""

    def __init__(self) -> None:
        self._status = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> _Loading:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done()

    def say(self, name: str) -> None:
        """Show that the model *name* is being loaded."""
        if self._status:
            self._status.update(f"loading {escape(name)}: it is cut and measured while it is served")
        else:
            say(f"loading {name}")

    def started(self, server: Server) -> None:
        """Print the server's address and models."""
        self.done()
        _announce(server)

    def done(self) -> None:
        """Remove the status line."""
        if self._status:
            self._status.stop()


def _check(settings: ServerConfig) -> None:
    """Load the models and print them; InputError if the server would not be ready."""
    import asyncio

    from weft.serving.server import Server, fastest_loop

    logging.basicConfig(level=logging.ERROR)  # warnings about models are in the table
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
    """Print every model that is present or missing, with its state and its remarks."""
    table = plain_table("", ("model", "version", "state", ""), left=4)
    slots = list(service.library.slots())
    for slot in slots:
        state, text = _state(slot, service.library.why_unusable(slot))
        add_row(table, slot.entry.name, slot.entry.version, state, text)
    repository, known = service.library.repository, {slot.entry.name for slot in slots}
    for name, why in repository.problems.items():
        add_row(table, name, "", "problem" if name in known else "failed", why)
    for name, remark in repository.remarks.items():
        add_row(table, name, "", "remark", remark)
    console.print(table)


def _state(slot: ModelSlot, why_unusable: str) -> tuple[str, str]:
    """Return a model's state as a word, and a text with its segments and remarks."""
    if why_unusable:
        return "failed", why_unusable
    if slot.served is None:
        return "on demand", slot.message
    return "ready", "; ".join(filter(None, (_segments_text(slot.served.loaded), slot.message)))


def _finishing(requests: int) -> None:
    """Print that the server waits for running requests before it ends."""
    say(f"finishing {counted(requests, 'request')}; Ctrl-C again to stop now")


def _announce(server: Server) -> None:
    """Print the server's address, its models, and problems of the repository."""
    config, service = server.config, server.service
    scheme = "https" if config.network.tls_cert else "http"
    address = f"{scheme}://{config.network.host}:{server.http_port}"
    missing = service.why_not_ready()
    console.print()
    _line(f"not ready  {address}  {missing}" if missing else f"ready  {address}")
    if missing:
        _line("           mend what is missing, then POST /v2/repository/models/NAME/load")
    if server.grpc_port:
        say(f"       grpc {config.network.host}:{server.grpc_port}")
    lanes = counted(len(service.dispatcher.lanes.lanes), "lane")
    say(f"       policy {config.scheduling.policy}, {lanes}, stop with Ctrl-C\n")
    lines: dict[tuple[str, str], list[str]] = {}
    for slot in service.library.slots():
        state = _segments_text(slot.served.loaded) if slot.served else slot.state
        text = f"{slot.entry.version}: {state}  {slot.message}"
        # models of one file fail for the same reason, which is printed once for all of them
        group = "" if slot.state == "failed" else slot.entry.name
        lines.setdefault((group, text), []).append(slot.entry.name)
    for (_, text), names in lines.items():
        _line(f"       {', '.join(names)} {text}")
    repository = service.library.repository
    for name, why in repository.problems.items():
        _line(f"       problem: {name}: {why}")
    for name, remark in repository.remarks.items():
        _line(f"       remark: {name}: {remark}")


def _segments_text(loaded: LoadedModel) -> str:
    """Return the number of segments and the exits of a model as a text."""
    exits = ", ".join(spec.output for spec in loaded.exits.specs) if loaded.exits else ""
    return counted(len(loaded.segments), "segment") + (f", exits {exits}" if exits else "")


def _line(text: str) -> None:
    """Print a line without wrapping it."""
    say(text.rstrip(), soft_wrap=True)
