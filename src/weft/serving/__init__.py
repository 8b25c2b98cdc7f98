"""The server: the Open Inference Protocol over HTTP and gRPC, and the engine that decides behind it.

Modules, by concern:

- protocols: ``routes.py`` (HTTP, over ``weft.http``), ``grpc_*.py`` (gRPC), ``wire.py`` (tensors as bytes),
  ``endpoints.py`` (the table of HTTP paths and gRPC calls), ``in_process.py`` (``weft.Server``, without a network)
- access: ``access.py`` (API keys, rate limits, quotas, host names, origins)
- inference: ``inference.py`` and ``service.py`` (operations), ``dispatch.py`` (the engine with real clients),
  ``client_feed.py`` (answers, retries of requests whose worker died, quarantine), ``request_parameters.py``
  (deadlines), ``classification.py`` (outputs as classes)
- shared memory: ``regions.py``, ``shared_memory.py``, ``region_tensors.py``
- models: ``repository.py`` (files), ``library.py`` (loading, eviction), ``learning.py`` (cutting in the background),
  ``gpu_sharing.py`` (shares of a GPU), ``renewal.py`` (a newer plan, without a restart)
- observation: ``metrics.py`` (``/metrics``), ``history.py`` (the last ten minutes), ``telemetry.py`` (spans)
- settings: ``config.py`` (files), ``environment.py`` (environment variables), ``client_settings.py`` (log and trace
  settings that clients change)

A request through the server:

    bytes ─ weft.http ─ routes.py ─ wire.py ─┐                                     ┌─ lane 0: start ... end
    bytes ─ grpc ────── grpc_service.py ─────┴ inference.py ─ dispatch.py ─ Engine ┤   (inside the backend)
                                              library.py      Requests, Policy     └─ lane 1: ...

Everything except the backend runs on one event loop, so there are no locks. `wire` turns bytes into arrays that are
checked against the model. `inference` finds the model, loads it if necessary, and computes the request's deadline.
`dispatch` refuses a request that cannot be served, or puts it into the queue of its model and shapes. The end of each
segment is an event: its time is learned, and the engine decides again.

Segments that are shorter than a thread switch run on the event loop itself if the backend supports that (`inline`) and
the segment is *steady*: `runtime/values.py` follows the values of the inputs through the graph, and where they decide
the cost or the output shape of a node (control flow, `Expand`, `Range`, ...), its segment and those that consume its
output run on lanes. Runs on lanes can be stopped, which happens when no request needs their result any more.

A requested model is opened whole on a thread of its own (`background_tasks.py`) and served. `learning.py` then opens
it in full, one model at a time: the backend cuts, measures and warms it up, and stores the result in its cache; this
can be stopped (`onnxruntime_cpu/allowance.py`). `library.py` replaces the whole model by it; the old one is closed
after its last request. Shutdown waits for neither loading nor learning (`process.py`).

A request has one name at each stage:

| name | what it is |
|---|---|
| `HttpExchange`, `HttpResponse` | an HTTP request with the way to answer it, and the answer (`http/messages.py`) |
| `InferRequest` | a request for inference, checked against the model's `ModelSpec` (`serving/wire.py`) |
| `InferResponse` | its outputs, with parameters that describe how they were computed (`serving/wire.py`) |
| `InferCall` | a request between those two; its model may still be loading, and it can be cancelled (`inference.py`) |
| `Ticket` | a request in the engine: arrival, deadline, priority (`engine/tickets.py`) |
| `ClientTicket` | the `Ticket` of a real client, with its inputs and its reply callback (`serving/tickets.py`) |
| `Batch` | tickets that run together, and their progress (`engine/tickets.py`) |
| `BatchWork` | what lanes compute for a `Batch`: its tensors between two segments (`serving/tickets.py`) |
| `Candidate` | the next layer of a `Batch`, as the policy sees it (`engine/policies/base.py`) |
| `Completion` | that layer, computed or not, and its `LayerTimes` (`engine/engine.py`) |
| `Step`, `StepOutput`, `StepEnd` | the input of a segment of a `Batch` for a backend, its output, and its end |

So has a model:

| name | what it is |
|---|---|
| `ModelEntry` | a version of a model in a repository: its file and its `ModelConfig` (`serving/repository.py`) |
| `ModelConfig` | what the user set for it: deadlines, batches, exits (`serving/config.py`) |
| `ModelSlot` | a `ModelEntry`'s place in the library: loaded or not, and why not (`serving/slots.py`) |
| `LoadOptions` | how a backend cuts, measures and batches it (`runtime/backend.py`) |
| `LoadedModel` | it in a device's memory, in segments; `CpuModel` is ONNX Runtime's, made from a cached `Blueprint` |
| `ServedModel` | a `LoadedModel` that takes requests: its queue, its streams, its counters (`serving/streams.py`) |
| `ServedStream` | requests for a `ServedModel` that have the same shapes, and so the same cost |
| `ModelSpec` | what requests for it must look like: names, types and shapes (`serving/wire.py`) |
| `Program` | what the scheduler knows of it: ticks of each layer or segment (`devices/costs/program.py`) |
"""
