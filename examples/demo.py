"""The main job in a minute: real models, two NPUs, every policy, a timeline you can open.

Each step is a command anyone can type; it is printed before it runs.
"""

import os
import shlex
from pathlib import Path

from weft.cli.main import app

OUT = Path("out/demo")
WORKLOAD = os.path.relpath(Path(__file__).parent / "assistant.toml")

COMMANDS = [
    "models show pp-ocr-det",
    "models show magika",
    f"compare --device tpuv3-like --models pp-ocr-det,bert-base --html {OUT}/tpuv3-like.html",
    f"compare --device nnpi-like --batch 16 --models resnet50,bert-large --html {OUT}/nnpi-like.html",
    f"simulate --device nnpi-like --batch 16 --models magika,bert-base --policy weft --figure {OUT}/woven.png",
    f"simulate --workload {WORKLOAD} --policy weft+",
]


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for command in COMMANDS:
        print(f"\n$ weft {command}")
        app(args=shlex.split(command), standalone_mode=False)
    print(f"\nOpen {OUT}/tpuv3-like.html and {OUT}/nnpi-like.html in a browser: zoom with the wheel, hover a layer.")


if __name__ == "__main__":
    main()
