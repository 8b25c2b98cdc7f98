"""The load generator: sends a workload's requests at their times to any server of the Open Inference Protocol."""

from weft.load.generator import Progress, drive, run_load
from weft.load.report import BROKEN, LOST, LoadResult, StreamFigures, StreamLoad

__all__ = ["BROKEN", "LOST", "LoadResult", "Progress", "StreamFigures", "StreamLoad", "drive", "run_load"]
