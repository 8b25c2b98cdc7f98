"""Gates inside CUDA graphs: kernels that decide between the segments of a model whether the next one runs.

The captured segments are the cases of a SWITCH node in a WHILE node of one executable graph. Kernels of one thread,
compiled by NVRTC when the first model is captured, set the conditions. Parameters of a launch are in a ring in pinned
memory of the host; the graph counts its launches itself and so finds its entry, which costs the host nothing but
writing it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from weft.runtime.cuda.captured import is_empty
from weft.runtime.cuda.gates import REFUSED, Computed, SegmentSpan
from weft.runtime.cuda.partitions import Part, bindings
from weft.runtime.tensors import Array

ENTRIES = 64
"""Launches of one rung that may be under way: more than all lanes of a device hold."""
_HEADER_WORDS = 4  # of 8 bytes: first, end, slot, generation, number of copies and padding
_STATE_WORDS = 4  # of 8 bytes, of the state before the copy of the entry
_COPY_BLOCKS, _COPY_THREADS = 128, 256
_WHILE, _SWITCH = "WHILE", "SWITCH"
_ON_DEVICE, _READ_ONLY = 2, 8  # flags of cuMemHostRegister

_SOURCE = r"""
typedef unsigned long long u64;
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);

struct Launch { int first, end, slot, generation, copies, padding[3]; };
struct Copy { u64 target, source, bytes; };
// begun: launches so far. generation: those of them that a gate ended. at: segments from 0 that are done. on: whether
// the launch computes anything. Behind them is a copy of the launch's entry.
struct State { unsigned begun; int generation, at, on, padding[4]; Launch launch; Copy copy[1]; };

extern "C" __global__ void enter(const volatile u64* ring, int words, int entries, State* state,
                                 const volatile unsigned* stops, u64 again, u64 which) {
  const volatile u64* entry = ring + (u64)(state->begun % entries) * words;
  u64* mine = (u64*)&state->launch;
  for (int i = threadIdx.x; i < words; i += blockDim.x) mine[i] = entry[i];
  __syncthreads();
  if (threadIdx.x) return;
  const Launch& launch = state->launch;
  state->at = launch.first;
  state->on = launch.generation == state->generation && !stops[launch.slot];
  cudaGraphSetConditional(again, state->on);
  cudaGraphSetConditional(which, launch.first);
}

extern "C" __global__ void copy(const State* state) {
  if (!state->on) return;
  u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
  for (int i = 0; i < state->launch.copies; ++i) {
    Copy c = state->copy[i];
    u64 wide = (c.target | c.source) % 16 ? 0 : c.bytes / 16;
    for (u64 j = thread; j < wide; j += threads) ((uint4*)c.target)[j] = ((const uint4*)c.source)[j];
    for (u64 j = wide * 16 + thread; j < c.bytes; j += threads) ((char*)c.target)[j] = ((const char*)c.source)[j];
  }
}

// The gate behind a segment.
extern "C" __global__ void gate(State* state, const volatile unsigned* stops, u64 again, u64 which) {
  const Launch& launch = state->launch;
  int at = ++state->at;
  bool run = at < launch.end && !stops[launch.slot];
  cudaGraphSetConditional(again, run);
  if (run) cudaGraphSetConditional(which, at);
}

extern "C" __global__ void finish(State* state, int entries, int refused, volatile int* computed) {
  const Launch& launch = state->launch;
  int done = state->at - launch.first;
  bool valid = launch.generation == state->generation;
  if (valid && done < launch.end - launch.first) ++state->generation;
  computed[state->begun % entries] = valid ? done : refused;
  ++state->begun;
  __threadfence_system();
}
"""


class NoGates(Exception):
    """This driver, GPU or model cannot have gates; the text says why."""


class GateKernels:
    """The compiled kernels of the gates of one GPU."""

    def __init__(self, index: int) -> None:
        """index: number of the GPU, whose primary context is current. ``NoGates`` if something is missing."""
        try:
            self.driver = bindings()
            from cuda.bindings import nvrtc
        except Exception as error:  # NoPartitions, ImportError
            raise NoGates(f"cuda-bindings: {error}") from error
        driver = self.driver
        if not hasattr(driver, "cuGraphConditionalHandleCreate"):
            raise NoGates("cuda-bindings is older than conditional nodes of graphs")
        major, minor = torch.cuda.get_device_capability(index)
        try:
            (program,) = checked(nvrtc.nvrtcCreateProgram(_SOURCE.encode(), b"gates.cu", 0, [], []))
            options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
            (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            if int(result):
                (size,) = checked(nvrtc.nvrtcGetProgramLogSize(program))
                text = b" " * size
                nvrtc.nvrtcGetProgramLog(program, text)
                raise NoGates(f"NVRTC: {text.decode(errors='replace').strip()[:400]}")
            (size,) = checked(nvrtc.nvrtcGetCUBINSize(program))
            self._code = b" " * size
            checked(nvrtc.nvrtcGetCUBIN(program, self._code))
            (self._library,) = checked(driver.cuLibraryLoadData(self._code, [], [], 0, [], [], 0))
            self._kernels = {
                name: checked(driver.cuLibraryGetKernel(self._library, name.encode()))[0]
                for name in ("enter", "copy", "gate", "finish")
            }
        except (RuntimeError, OSError) as error:  # NVRTC's library is loaded by its first call
            raise NoGates(f"the gates cannot be compiled: {str(error).splitlines()[0]}") from error

    def function(self, name: str) -> Any:
        """A kernel in the calling thread's current context."""
        return checked(self.driver.cuKernelGetFunction(self._kernels[name]))[0]


class RegisteredStops:
    """The stop table, registered with the driver."""

    def __init__(self, stops: Array, index: int) -> None:
        """stops: mapped for reading only. ``NoGates`` if the driver cannot register it."""
        driver = bindings()
        self.array = stops  # mapped as long as the GPU may read it
        (device,) = checked(driver.cuDeviceGet(index))
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
        (supported,) = checked(driver.cuDeviceGetAttribute(attribute, device))
        if not supported and not stops.flags.writeable:
            raise NoGates("the driver cannot register memory that is mapped for reading only")
        flags = _ON_DEVICE | (0 if stops.flags.writeable else _READ_ONLY)
        try:
            checked(driver.cuMemHostRegister(stops.ctypes.data, stops.nbytes, flags))
            (address,) = checked(driver.cuMemHostGetDevicePointer(stops.ctypes.data, 0))
        except RuntimeError as error:
            raise NoGates(f"the stop table cannot be registered: {error}") from error
        self.address = int(address)
        weakref.finalize(self, _unregister, driver, stops).atexit = False


def _unregister(driver: Any, stops: Array) -> None:
    """Take the stop table back from the driver, before its memory is unmapped."""
    driver.cuMemHostUnregister(stops.ctypes.data)


class GpuGateMemory:
    """What the gates of one rung read and write."""

    def __init__(self, stops: RegisteredStops, device: Any, copies: int) -> None:
        """device: torch's. copies: most tensors that a launch copies."""
        self._words = _HEADER_WORDS + 3 * copies
        self.stops = stops
        # Pinned memory of torch has the same address for the GPU.
        self._ring = torch.zeros((ENTRIES, self._words), dtype=torch.int64, pin_memory=True)
        self._computed = torch.zeros(ENTRIES, dtype=torch.int32, pin_memory=True)
        self._state = torch.zeros(_STATE_WORDS + self._words, dtype=torch.int64, device=device)
        torch.cuda.current_stream().synchronize()  # the state is zero before any stream launches
        self._entries: Array = self._ring.numpy()
        self._headers: Array = self._entries.view(np.int32)
        self._results: Array = self._computed.numpy()
        self._begun = self._ended = 0  # launches

    def launch(self, graph: Callable[[], None], span: SegmentSpan, copies: Sequence[tuple[Any, Any]]) -> Computed:
        if self._begun - self._ended >= ENTRIES:
            raise RuntimeError(f"{ENTRIES} launches of one batch size are under way")
        entry = self._begun % ENTRIES
        self._headers[entry, :5] = (*span, len(copies))
        # Kept until the launch: memory that is freed before may be given away before the graph reads it.
        sources = [source.to(target.dtype).contiguous() for target, source in copies]
        for number, ((target, original), source) in enumerate(zip(copies, sources, strict=True)):
            for tensor in {id(original): original, id(source): source}.values():
                tensor.record_stream(torch.cuda.current_stream())  # it may have been made on another lane
            words = target.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
            at = _HEADER_WORDS + 3 * number
            self._entries[entry, at : at + 3] = words
        graph()
        self._begun += 1

        def computed() -> int:
            self._ended += 1
            return int(self._results[entry])

        return computed

    @property
    def ring(self) -> tuple[int, int]:
        """The address of the entries of launches, and the words of 8 bytes of an entry."""
        return int(self._ring.data_ptr()), self._words

    @property
    def state(self) -> int:
        """The address of the state."""
        return int(self._state.data_ptr())

    @property
    def computed(self) -> int:
        """The address of the numbers of segments that launches have computed."""
        return int(self._computed.data_ptr())


_P, _I, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64


class GatedGraph:
    """The segments of a rung with their gates as one executable graph; calling ``launch`` starts it on a stream."""

    def __init__(self, kernels: GateKernels, memory: GpuGateMemory, segments: Sequence[int], part: Part | None) -> None:
        """segments: the driver's handles of their captured graphs. part: on which they were captured."""
        self._driver, self._kernels = kernels.driver, kernels
        self._memory = memory  # kept, as the graph reads and writes it
        driver = self._driver
        with context_of(part):
            (self._graph,) = checked(driver.cuGraphCreate(0))
            try:
                (self._context,) = checked(driver.cuCtxGetCurrent())
                self._add_nodes(segments)
                (self._executable,) = checked(driver.cuGraphInstantiate(self._graph, 0))
            except BaseException:
                driver.cuGraphDestroy(self._graph)
                raise

    def launch(self, stream: int) -> None:
        checked(self._driver.cuGraphLaunch(self._executable, self._driver.CUstream(stream)))

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            self._driver.cuGraphExecDestroy(self._executable)
            self._driver.cuGraphDestroy(self._graph)

    def _add_nodes(self, segments: Sequence[int]) -> None:
        memory, graph = self._memory, self._graph
        again, which = self._condition(), self._condition()
        conditions = (_U, int(again)), (_U, int(which))
        state, stops = (_P, memory.state), (_P, memory.stops.address)
        ring, words = memory.ring
        last = self._kernel(
            graph, None, "enter", (_P, ring), (_I, words), (_I, ENTRIES), state, stops, *conditions, threads=128
        )
        last = self._kernel(graph, last, "copy", state, blocks=_COPY_BLOCKS, threads=_COPY_THREADS)
        last, (turn,) = self._conditional(graph, last, again, _WHILE)
        switch, cases = self._conditional(turn, None, which, _SWITCH, len(segments))
        for case, segment in zip(cases, segments, strict=True):
            if not is_empty(segment):
                checked(self._driver.cuGraphAddChildGraphNode(case, [], 0, self._driver.CUgraph(segment)))
        self._kernel(turn, switch, "gate", state, stops, *conditions)
        self._kernel(graph, last, "finish", state, (_I, ENTRIES), (_I, REFUSED), (_P, memory.computed))

    def _condition(self) -> Any:
        """A new condition of the graph, which has no value before a kernel sets it."""
        return checked(self._driver.cuGraphConditionalHandleCreate(self._graph, self._context, 0, 0))[0]

    def _kernel(
        self, graph: Any, after: Any, name: str, *parameters: tuple[Any, int], blocks: int = 1, threads: int = 1
    ) -> Any:
        """Add a kernel behind the node *after*; *parameters*: type and value of each."""
        node = self._driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = self._kernels.function(name)
        node.gridDimX, node.gridDimY, node.gridDimZ = blocks, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = threads, 1, 1
        kinds, values = zip(*parameters, strict=True)
        node.sharedMemBytes, node.kernelParams = 0, (values, kinds)
        before = [] if after is None else [after]
        return checked(self._driver.cuGraphAddKernelNode(graph, before, len(before), node))[0]

    def _conditional(
        self, graph: Any, after: Any, handle: Any, kind: str, bodies: int = 1
    ) -> tuple[Any, Sequence[Any]]:
        """Add a conditional node behind the node *after*; returns it and the graphs of its bodies."""
        driver = self._driver
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        conditional = node.conditional
        conditional.handle, conditional.size, conditional.ctx = handle, bodies, self._context
        conditional.type = getattr(driver.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
        before = [] if after is None else [after]
        try:
            (added,) = checked(driver.cuGraphAddNode(graph, before, None, len(before), node))
        except TypeError:  # cuda-bindings before 13
            (added,) = checked(driver.cuGraphAddNode(graph, before, len(before), node))
        return added, list(node.conditional.phGraph_out)[:bodies]


@contextmanager
def context_of(part: Part | None) -> Any:
    """Make the context of a part current; None: the GPU's primary context stays."""
    if part is None:
        yield
        return
    driver = bindings()
    (context,) = checked(driver.cuCtxFromGreenCtx(part.context))
    checked(driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent())


def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that a call of the driver or of NVRTC returned after its status; RuntimeError for an error."""
    result, *values = answer
    if int(result):
        raise RuntimeError(f"the driver says {result.name}")
    return tuple(values)
