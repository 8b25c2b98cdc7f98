"""Ask any server of the protocol for the whole table, and print in what it differs.

    python -m tests.conformance --write-models models/         # what the table asks for; then serve them
    python -m tests.conformance --http http://127.0.0.1:8000 --grpc 127.0.0.1:8001 [--by protocol,triton] [--json FILE]

Run it from the root of the checkout, with the packages of ``pip install -e .[dev]``. Exits with 0 if no row differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.judging import PlanRequest, judge
from tests.conformance.models import write_repository
from tests.conformance.over_grpc import grpc_target
from tests.conformance.over_http import HttpTarget
from tests.conformance.reporting import Outcome, as_json, show
from tests.conformance.rows import ORIGINS, GrpcRow, HttpRow, read_table


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.write_models:
        write_repository(args.write_models)
    if not (args.http or args.grpc):
        return 0
    outcomes = asked_for(args.http, args.grpc, _chosen(args.by.split(","), args.rows), args.patience)
    show(outcomes)
    if args.json:
        about = {"http": args.http, "grpc": args.grpc}
        args.json.write_text(json.dumps(as_json(outcomes, about), indent=1) + "\n", "utf-8")
    return int(any(each.differences for each in outcomes))


def asked_for(
    http: str | None, grpc: str | None, rows: Sequence[HttpRow | GrpcRow], patience_s: float
) -> list[Outcome]:
    """Send all rows that can be sent to a server, one after another."""
    with contextlib.ExitStack() as stack:
        asked = PlanRequest(
            HttpTarget(http, patience_s) if http else None,
            stack.enter_context(grpc_target(grpc, patience_s)) if grpc else None,
        )
        return [Outcome.of(row, judge(asked, row)) for row in rows if asked.takes(row)]


def _chosen(origins: Sequence[str], pattern: str) -> list[HttpRow | GrpcRow]:
    return [row for row in read_table() if row.by in origins and re.search(pattern, row.name)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("--http", metavar="URL", help="where the server listens for HTTP")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="where it listens for gRPC")
    parser.add_argument("--by", default=",".join(ORIGINS), help="whose demands: protocol, triton, weft; with commas")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows whose names match")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row and its differences")
    parser.add_argument("--patience", type=float, default=30.0, metavar="S", help="seconds to wait for an answer")
    parser.add_argument("--write-models", type=Path, metavar="DIR", help="write the models that the table asks for")
    args = parser.parse_args(argv)
    if not (args.http or args.grpc or args.write_models):
        parser.error("say where the server is: --http, --grpc or both; or have the models written: --write-models")
    return args


if __name__ == "__main__":
    sys.exit(main())
