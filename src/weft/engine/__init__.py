"""The loop and its executors; ``compiled`` gives the same orders from kernels."""

from weft.engine.engine import Engine, Executor, Task
from weft.engine.simulated_npu import SimulatedNpu

__all__ = ["Engine", "Executor", "SimulatedNpu", "Task"]
