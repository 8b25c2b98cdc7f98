"""The main features in a few minutes: real models on simulated NPUs and SoCs, stitched, tuned, and served.

Each step is a command that you can type; it is printed before it runs.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from weft.cli.app import app

OUT = Path("out/demo")
WORKLOAD = os.path.relpath(Path(__file__).parent / "assistant.toml")
EXITS = os.path.relpath(Path(__file__).parent / "early-exits.toml")
BENCHMARKS = Path(os.path.relpath(Path(__file__).parent.parent / "benchmarks"))

COMMANDS = [
    "models show pp-ocr-det",
    "models show magika",
    f"compare --device tpuv3-like --models pp-ocr-det,bert-base --html {OUT}/tpuv3-like.html",
    f"compare --device nnpi-like --batch 16 --models resnet50,bert-large --html {OUT}/nnpi-like.html",
    f"simulate --device nnpi-like --batch 16 --models magika,bert-base --policy weft --figure {OUT}/woven.png",
    f"simulate --workload {WORKLOAD} --policy weft+",
    f"simulate --workload {EXITS} --policy fluid --late keep",
    f"simulate --workload {EXITS} --policy top-up",
    f"map --soc xavier --models vgg19,resnet152 --html {OUT}/xavier.html",
    f"tune lenet --margin 0.01 --layers conv --device tpuv3-like --fresh -o {OUT}/lenet",
    f"models generate resnet18 --tasks 4 --pruning 0.9 -o {OUT}/nets",
    f"stitch {' '.join(f'{OUT}/nets/resnet18-{task}.onnx' for task in range(4))} -o {OUT}/one.onnx",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", default="15", help="how long the server is driven under each policy")
    seconds = parser.parse_args().seconds
    OUT.mkdir(parents=True, exist_ok=True)
    for command in COMMANDS:
        print(f"\n$ weft {command}")
        app(args=shlex.split(command), standalone_mode=False)
    serve(seconds)
    pages = ", ".join(f"{OUT}/{name}.html" for name in ("tpuv3-like", "nnpi-like", "xavier"))
    print(f"\nOpen {pages} in a browser: zoom with the wheel, hover a layer.")


def serve(seconds: str) -> None:
    """Run a real server: an urgent model beside a heavy one, then a network with exits, each under two policies."""
    for script, options in (
        ("head_of_line.py", ["--policies", "fifo,punctual"]),
        ("early_exits.py", ["--timeouts", "5", "--policies", "top-up"]),
    ):
        command = [str(BENCHMARKS / script), "--seconds", seconds, "--repeats", "1", *options]
        print(f"\n$ python {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()
