"""CUDA graphs for machines without a GPU: what `plugins/performance/cuda_graph.py` asks of torch.cuda, on the CPU.

A capture notes every operation with the memory it reads and writes; a replay runs each again, on the same memory. As on
a GPU a number of Python stays what it was, a tensor that has moved is not found again, a read by the host is an error,
and a capture by itself changes nothing: what it has written is put back, and its own memory holds nothing of use.
Stricter than a GPU:

memory       of a capture holds rubbish after each replay, unless a tensor outside of the graphs lies in it: the next
             graph of the pool may have that memory. Memory that was freed after the capture ends the replay.
a read       of the host leaves allocator and generators as torch leaves them: nothing is given back, no random number
gradients    of a node AccumulateGrad of the default stream, made by a DDP or a step whose graph is alive, are an
             error, with the words of torch 2.13
a collection may not come amid a capture: it could end a graph, or free what another stream has used
"""

import contextlib
import gc
import inspect
import sys
import warnings
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from engine import contract, meter
from engine.comm import buffers

DISPATCH = ("recording.py", "fake_gpu.py", "host_part.py")
READ = torch.ops.aten._local_scalar_dense.default


def tensors_in(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def storage_of(tensor):
    """The memory of a tensor of the CPU, or of one of `fake_gpu.py`."""
    return vars(tensor).get("inner", tensor).untyped_storage()  # of others, `inner` is a method


def address(tensor):
    return storage_of(tensor).data_ptr()


def on_device(tensor):
    """Whether a tensor is on the GPU of `fake_gpu.py`. Without it the tensors of the CPU are."""
    return place.gpu is None or tensor.is_cuda


def constant(tensor):
    """A number of the host in an operation of the GPU is an argument of a kernel: a constant of the graph."""
    return tensor if on_device(tensor) or tensor.ndim else tensor.clone()


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    launched = 0
    alive = weakref.WeakSet()

    def __init__(self):
        self.operations = []  # (function, arguments, outputs in memory of their own or None, with gradients or not)
        self.mine, self.given = {}, {}  # storages by address: of its own, and of others
        self.alive.add(self)

    def replay(self):
        Graph.launched += 1
        held = self.held()
        if freed := [storage for storage in self.given.values() if not is_used(storage, held)]:
            raise RuntimeError(f"a graph reads memory that was freed: {[storage.nbytes() for storage in freed]} bytes")
        for function, args, kwargs, kept, has_grad in self.operations:
            with torch.set_grad_enabled(has_grad):  # oneDNN's LSTM has other outputs without
                for old, new in zip(kept, tensors_in(function(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)
        for storage in self.mine.values():
            if not is_used(storage, held):
                storage.fill_(255)

    @classmethod
    def held(cls):
        """How many tensors of the graphs lie in each storage."""
        counts = Counter()
        for graph in cls.alive:
            for _, args, kwargs, kept, _ in graph.operations:
                counts.update(address(tensor) for tensor in tensors_in((args, kwargs, kept)))
        return counts


def is_used(storage, held):
    """Whether a tensor outside of the graphs lies in the storage. One more count is of the Python object."""
    return not storage.nbytes() or torch._C._storage_Use_Count(storage._cdata) - 1 > held[storage.data_ptr()]


class Capture(TorchDispatchMode):
    """Stands in for torch.cuda.graph."""

    def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
        super().__init__()
        assert pool in (None, "pool"), "pieces that share memory are recorded into one pool"
        assert stream is not place.current_stream(), "a capture needs a stream of its own"
        assert pool is None or not gc.isenabled(), "a collection amid a capture may end a graph"
        assert not underway and not spoilt, "a capture after one that has failed, or within another"
        self.graph, self.stream, self.mine, self.before = graph, stream, graph.mine, {}

    def __enter__(self):
        self.left = place.current_stream()
        place.set_stream(self.stream)
        self.state = place.generator.get_state()
        underway.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        underway.clear()
        place.generator.set_state(self.state)
        held = Graph.held()
        for storage, was in self.before.values():
            storage.copy_(was)
            if storage.nbytes() > 8 or is_used(storage, held):  # else a number of Python, which torch has wrapped
                self.graph.given[storage.data_ptr()] = storage
        for storage in self.mine.values():
            storage.fill_(255)
        if spoilt:  # its stream stays the current one, allocator and generators know of no end
            Spoilt().__enter__()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        place.set_stream(self.left)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is READ and on_device(args[0]):
            forbid()
        args, kwargs = tree_map_only(torch.Tensor, constant, (args, kwargs or {}))
        given = tensors_in((args, kwargs))
        for tensor in filter(on_device, given):
            if address(tensor) not in self.mine | self.before:
                storage = storage_of(tensor)
                self.before[address(tensor)] = storage, storage.clone()
        # Not the tensors themselves: their memory may be exchanged.
        fixed = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        out = function(*args, **kwargs)
        if not any(map(on_device, [*given, *tensors_in(out)])):
            return out  # the host's own work is in no graph
        places = {address(tensor) for tensor in given}
        kept = [None if address(tensor) in places else tensor.detach() for tensor in tensors_in(out)]
        self.mine |= {address(tensor): storage_of(tensor) for tensor in kept if tensor is not None}
        if function._schema.is_mutable or any(tensor is not None for tensor in kept):  # else it is a view
            self.graph.operations.append((function, *fixed, kept, torch.is_grad_enabled()))
        return out


underway = []
"""The capture that has begun."""
spoilt = []
"""What torch has not ended after a capture that CUDA has refused: the pool's allocation, the generators."""


def forbid():
    """What waits for the GPU, and copies to the host, end a capture."""
    if underway:
        spoilt[:] = "pool", "generators"
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore words")


class Spoilt(TorchDispatchMode):
    """After a capture that CUDA has refused."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "generators" in spoilt and torch.Tag.nondeterministic_seeded in function.tags:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return function(*args, **kwargs or {})


class Generator:
    """Stands in for a GPU's; without `fake_gpu.py` its numbers are those of the CPU's."""

    def clone_state(self):
        return self

    def graphsafe_set_state(self, state):
        if "generators" in spoilt:
            spoilt.remove("generators")

    def manual_seed(self, seed):
        assert not underway, "a seed is set amid a capture"
        place.generator.manual_seed(seed)

    def __getattr__(self, name):
        if name in ("get_state", "set_state"):
            forbid()
        return getattr(place.generator, name)


def end_allocation(device, pool):
    if "pool" not in spoilt:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    spoilt.remove("pool")


def empty_cache():
    assert "pool" not in spoilt, "captures_underway.empty() INTERNAL ASSERT FAILED"


# ---- the nodes that accumulate gradients, each on the stream where it was made

overrides = [False]
usual = []
"""The default stream."""


def node_of(parameter):
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def accumulators(node):
    """The nodes AccumulateGrad behind a node."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            yield node
        waiting += [behind for behind, _ in node.next_functions]


def watched_backward(backward):
    def watched(self, *args, **more):
        for node in accumulators(self.grad_fn):
            made_on = node.metadata.setdefault("made on", place.current_stream())
            if underway and made_on is usual[0] and not overrides[0]:
                raise RuntimeError(
                    "During CUDA graph capture, autograd node 'AccumulateGrad' has a stale reference to the default "
                    "stream (stream 0) from warmup."
                )
        return backward(self, *args, **more)

    return watched


def watched_init(init):
    def watched(self, module, *args, **more):
        init(self, module, *args, **more)
        for parameter in module.parameters():
            if parameter.requires_grad:
                node_of(parameter).metadata["made on"] = place.current_stream()

    return watched


def override(enabled):
    overrides[0] = enabled


def check_capturable(self):
    """Torch's own, which a torch without CUDA leaves out."""
    if underway and not all(group["capturable"] for group in self.param_groups):
        raise RuntimeError(f"Attempting CUDA graph capture of step() for an instance of {type(self).__name__}")


def install_rules():
    """What a GPU, and torch, refuse amid a capture."""
    usual[:] = [place.current_stream()]
    torch.cuda.empty_cache, torch.cuda.current_device = empty_cache, lambda: 0
    torch.cuda.default_generators = (Generator(),)
    torch.cuda.is_current_stream_capturing = lambda: bool(underway)
    torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool = end_allocation, lambda device, pool: None
    torch.Tensor.backward = watched_backward(torch.Tensor.backward)
    DistributedDataParallel.__init__ = watched_init(DistributedDataParallel.__init__)
    torch.optim.Optimizer._accelerator_graph_capture_health_check = check_capturable
    if hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        torch.autograd.graph.set_override_stale_capture_stream = override


def user_line():
    """The file and the number of the innermost line that belongs neither to torch nor to a dispatch mode."""
    frame = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or Path(frame.f_code.co_filename).name in DISPATCH:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is READ:
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, *user_line())
        return function(*args, **kwargs or {})


for mode in (Capture, Spoilt, Watch):  # else torch's compiler is loaded: 2 s in each run
    plain = inspect.unwrap(mode.__torch_dispatch__)
    plain.__dynamo_disable = plain


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


current = [Stream()]
place = SimpleNamespace(
    gpu=None,
    generator=torch.default_generator,
    current_stream=lambda: current[0],
    set_stream=lambda stream: current.__setitem__(0, stream),
)


@contextlib.contextmanager
def on(stream):
    before, current[0] = current[0], stream
    try:
        yield
    finally:
        current[0] = before


class Event:
    def record(self):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


watching = []


def set_sync_debug_mode(mode):
    if mode in ("warn", 1) and not watching:
        watching.append(Watch())
        watching[0].__enter__()
    elif mode in ("default", 0) and watching:
        watching.pop().__exit__(None, None, None)


class LaunchedGraph(Graph):
    """A graph of `fake_gpu.py`: its launch is one kernel of the step."""

    def replay(self):
        with place.gpu.launching():
            super().replay()


def put_back(self, skipped):
    """What `Buffers.put_back` does on a GPU; on a CPU it reads whether the step was skipped."""
    for _, buffer, before in self.changes():
        buffer.copy_(torch.where(skipped > 0, before, buffer))


def add_copy(add):
    """`Meter.add` with a copy of the numbers, as `to("cpu")` makes from a GPU."""
    return lambda self, numbers, *about, **more: add(self, numbers.clone(), *about, **more)


def install_on(gpu):
    """Give the module `fake_gpu`, which is installed, CUDA graphs."""
    global place
    place = SimpleNamespace(
        gpu=gpu,
        generator=gpu.generator.own,
        current_stream=gpu.current_stream,
        set_stream=gpu.set_stream,
    )
    torch.cuda.CUDAGraph, torch.cuda.graph = LaunchedGraph, Capture
    torch.cuda.graph_pool_handle = lambda: "pool"
    install_rules()


def install():
    """In this process from now on; numbers are read a step late, as from a GPU, and learning rates are float32's."""
    from engine import plan
    from plugins.performance import cuda_graph

    cuda_graph.KIND = "cpu"
    torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.Stream, torch.cuda.Event = Graph, Capture, Stream, Event
    torch.cuda.current_stream, torch.cuda.stream = lambda: current[0], on
    torch.cuda.graph_pool_handle, torch.cuda.synchronize = lambda: "pool", lambda device=None: None
    torch.cuda.mem_get_info, torch.cuda.max_memory_allocated = lambda device: (2, 2), lambda device: 1
    buffers.Buffers.put_back, meter.Meter.add = put_back, add_copy(meter.Meter.add)
    torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode = set_sync_debug_mode, lambda: len(watching)
    install_rules()
    contract._on = lambda device, number: number.to(device, torch.float64)  # none of these is the host's
    lr, begin = plan.Plan.lr, meter.Meter.__init__
    plan.Plan.lr = lambda self, step: float(np.float32(lr(self, step)))

    def on_gpu(self, *arguments):
        begin(self, *arguments)
        self.on_gpu = True

    meter.Meter.__init__ = on_gpu
