"""The server: the Open Inference Protocol over HTTP and gRPC, and the engine that decides behind it.

Its modules: ``routes.py``, ``wire.py``, ``grpc_*.py`` are its faces (over ``weft.http``), ``keys.py`` and ``hosts.py``
what they let in; ``classification.py``, outputs as classes; ``regions.py``, ``shared_memory.py`` and
``region_tensors.py``, tensors in shared memory; ``endpoints.py``, the table of HTTP paths and gRPC calls;
``inference.py`` and ``service.py``, what it does; ``library.py``, ``learning.py`` and ``repository.py``, which models
there are; ``dispatch.py``, the engine among real clients; ``request_parameters.py``, when a request is due;
``retries.py``, retries of requests whose worker died; ``gpu_sharing.py``, shares of a GPU among models;
``renewal.py``, a newer plan taken over while it runs; ``metrics.py``, what ``/metrics`` prints; ``history.py``, the
last ten minutes; ``environment.py``, settings from variables; ``in_process.py``, ``weft.Server``.

A request through the server:

    bytes ─ weft.http ─ routes.py ─ wire.py ─┐                                     ┌─ lane 0: start ... end
    bytes ─ grpc ────── grpc_service.py ─────┴ inference.py ─ dispatch.py ─ Engine ┤   (a backend's affair)
                                              library.py      Requests, Policy     └─ lane 1: ...

Everything but the backend lives on one event loop, so nothing is locked. `wire` turns bytes into arrays checked against
the model. `inference` finds the model, loads it if need be, and works out the request's deadline. `dispatch` refuses
what cannot be served, or lets it wait in the queue of its model and shapes. After each segment its end comes as an
event, its time is learned, and the engine decides again.

Segments shorter than a thread switch is worth run on the loop itself, where the backend can do that (`inline`), if they
are *steady*. `runtime/values.py` follows the values of the inputs through the graph. Where they decide what a node
costs or makes (control flow, `Expand`, `Range`, ...), its segment and those that take what it makes run on lanes. Every
run there can be told to stop, which happens when nobody waits for it any more.

A model that is asked for is opened whole on a thread of its own (`errands.py`) and served. `learning.py` then opens it
in full, one model at a time: the backend cuts, measures and warms it up, keeps that in its cache, and can be told to
stop (`onnxruntime_cpu/allowance.py`). `library.py` puts it in the place of the whole one, which leaves with its last
request. Loads and learning are never waited for when the server ends (`ending.py`).

A request has one name at each stage:

| name | what it is |
|---|---|
| `HttpExchange`, `HttpResponse` | an HTTP request with the way to answer it, and the answer (`http/messages.py`) |
| `InferRequest` | what is to be computed, checked against the model's `ModelSpec` (`serving/wire.py`) |
| `InferResponse` | its outputs, and what is said of how they were computed (`serving/wire.py`) |
| `InferCall` | a request between those two; its model may still be loading, and it can be cancelled (`inference.py`) |
| `Ticket` | a request in the engine: when it came, is due, and how urgent it is (`engine/tickets.py`) |
| `ClientTicket` | the `Ticket` of a real client, with its inputs and whom to reply to (`serving/tickets.py`) |
| `Batch` | tickets that run together, and how far they are (`engine/tickets.py`) |
| `BatchWork` | what lanes compute for a `Batch`: its tensors between two segments (`serving/tickets.py`) |
| `Candidate` | the next layer of a `Batch`, as the policy sees it (`engine/policies/base.py`) |
| `Completion` | that layer, computed or not, and its `LayerTimes` (`engine/engine.py`) |
| `Step`, `StepOutput`, `StepEnd` | a segment of a `Batch` as a backend is given it, what it makes, and its end |

So has a model:

| name | what it is |
|---|---|
| `ModelEntry` | a version of a model in a repository: its file and its `ModelConfig` (`serving/repository.py`) |
| `ModelConfig` | what the user set for it: deadlines, batches, exits (`serving/config.py`) |
| `ModelSlot` | a `ModelEntry`'s place in the library: loaded or not, and why not (`serving/slots.py`) |
| `LoadOptions` | how a backend shall cut, measure and batch it (`runtime/backend.py`) |
| `LoadedModel` | it in a device's memory, in segments; `CpuModel` is ONNX Runtime's, made from a cached `Blueprint` |
| `ServedModel` | a `LoadedModel` that takes requests: its line, its streams, its counters (`serving/streams.py`) |
| `ServedStream` | requests for a `ServedModel` that have the same shapes, and so the same cost |
| `ModelSpec` | what requests for it must look like: names, types and shapes (`serving/wire.py`) |
| `Program` | what the scheduler knows of it: ticks of each layer or segment (`devices/costs/program.py`) |
"""
