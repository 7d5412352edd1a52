"""CUDA graphs for machines without a GPU: what `plugins/performance/cuda_graph.py` asks of torch.cuda, on the CPU.

A capture notes every operation with the memory it reads and writes; a replay runs each again, on the same memory. As on
a GPU a number of Python stays what it was, a tensor that has moved is not found again, a read by the host is an error,
and a capture by itself changes nothing: what it has written is put back, and its own memory holds nothing of use.
"""

import contextlib
import inspect
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from engine import contract, meter
from engine.comm import buffers

READ = torch.ops.aten._local_scalar_dense.default


def tensors_in(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def storage_of(tensor):
    """The memory of a tensor of the CPU, or of one of `fake_gpu.py`."""
    return vars(tensor).get("inner", tensor).untyped_storage()  # of others, `inner` is a method


def address(tensor):
    return storage_of(tensor).data_ptr()


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    launched = 0

    def __init__(self):
        self.operations = []  # (function, arguments, outputs in memory of their own or None)

    def replay(self):
        Graph.launched += 1
        with torch.no_grad():
            for function, args, kwargs, kept in self.operations:
                for old, new in zip(kept, tensors_in(function(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)


class Capture(TorchDispatchMode):
    """Stands in for torch.cuda.graph."""

    def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
        super().__init__()
        assert pool in (None, "pool"), "pieces that share memory are recorded into one pool"
        assert stream is not place.current_stream(), "a capture needs a stream of its own"
        self.graph, self.stream, self.mine, self.before = graph, stream, {}, {}

    def __enter__(self):
        self.left = place.current_stream()
        place.set_stream(self.stream)
        self.generator = torch.default_generator.get_state()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.default_generator.set_state(self.generator)
        for storage, was in self.before.values():
            storage.copy_(was)
        for storage in self.mine.values():
            storage.fill_(255)
        if error[0]:  # and its stream stays the current one
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        place.set_stream(self.left)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is READ:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore words")
        given = tensors_in((args, kwargs))
        for tensor in given:
            if address(tensor) not in self.mine | self.before:
                storage = storage_of(tensor)
                self.before[address(tensor)] = storage, storage.clone()
        # Not the tensors themselves: their memory may be exchanged.
        fixed = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
        out = function(*args, **kwargs or {})
        places = {address(tensor) for tensor in given}
        kept = [None if address(tensor) in places else tensor.detach() for tensor in tensors_in(out)]
        self.mine |= {address(tensor): storage_of(tensor) for tensor in kept if tensor is not None}
        if function._schema.is_mutable or any(tensor is not None for tensor in kept):  # else it is a view
            self.graph.operations.append((function, *fixed, kept))
        return out


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is READ:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=3)
        return function(*args, **kwargs or {})


for mode in (Capture, Watch):  # else torch's compiler is loaded: 2 s in each run
    plain = inspect.unwrap(mode.__torch_dispatch__)
    plain.__dynamo_disable = plain


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


current = [Stream()]
place = SimpleNamespace(current_stream=lambda: current[0], set_stream=lambda stream: current.__setitem__(0, stream))


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
    place = SimpleNamespace(gpu=gpu, current_stream=gpu.current_stream, set_stream=gpu.set_stream)
    torch.cuda.CUDAGraph, torch.cuda.graph = LaunchedGraph, Capture
    torch.cuda.graph_pool_handle = lambda: "pool"


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
    contract._on = lambda device, number: number.to(device, torch.float64)  # none of these is the host's
    lr, begin = plan.Plan.lr, meter.Meter.__init__
    plan.Plan.lr = lambda self, step: float(np.float32(lr(self, step)))

    def on_gpu(self, *arguments):
        begin(self, *arguments)
        self.on_gpu = True

    meter.Meter.__init__ = on_gpu
