"""A GPU for machines without one: tensors that say `cuda:0` and compute on the CPU, with real numbers.

    python tests/kit/fake_gpu.py train.py har device=cuda steps=20     a line of JSON at the end: waits, kernels, copies
    FAKE_GRAPHS=1 python tests/kit/fake_gpu.py train.py har device=cuda cuda_graph=true    graphs of `recording.py`, too

As on a GPU: a host tensor beside the device's is an error, a single number is not; a copy to the host that does not
wait holds rubbish until an event after it, or anything else, is waited for; a copy from pageable memory waits; the
sanitizer of torch.cuda is told of streams, events and memory. Every wait is noted with the line of the project,
every kernel with its step, those of a stream of its own with the step that waits for them. Stricter than a GPU: what
was made on one stream is used on another only after `record_stream`, and only the main thread uses the main stream.
The GPU has a generator of its own, apart from the host's. Not emulated: times, memory, rounding and autocast's list of
CUDA (those are the CPU's), graphs, DDP's reducer, which is in C++.
"""

import collections
import contextlib
import inspect
import itertools
import json
import os
import runpy
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

ROOT = Path(__file__).resolve().parents[2]
GPU, RUBBISH = torch.device("cuda", 0), 113
READS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "equal", "_linalg_check_errors", "_coalesce")  # fmt: skip
TAKES_BOTH = ("copy_", "_to_copy", "index", "_index_put", "index_put", "set_", "lift")  # tensors of host and device
COPIES = ("copy_", "_to_copy")
NO_KERNEL = ("empty", "new_empty", "detach", "lift_fresh", "alias", "_local_scalar_dense", "set_", "record_stream")
DISPATCH = ("fake_gpu.py", "recording.py", "host_part.py")  # files of dispatch modes
IN_FLOAT32 = ("convolution",)  # in half, oneDNN writes beyond maps that are small (engine/precision.py)

waits: list[tuple[int, str]] = []  # step, the project's line and what it waits for
kernels: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)  # of each step
of_loader: dict[int, int] = collections.Counter()  # how many of them make the batches of a step
pinned: set[int] = set()  # addresses
pinned_sizes = collections.Counter()  # how many times memory of so many bytes was pinned
traffic = collections.Counter()  # copies to pinned memory, and their bytes
posted = collections.deque()  # copies to the host that have not arrived: (number, host tensor, what it will hold)
numbers, debug_mode, here = itertools.count(1), [0], threading.local()
arriving_now = threading.RLock()
forbid = lambda: None  # noqa: E731  # what waits amid a capture, see `recording.py`
strict = [True]  # about tensors of other streams; with graphs one stream waits for the other around each step


class CudaTensor(torch.Tensor):
    """A tensor on the GPU. Its numbers are those of `inner`, a tensor of the CPU; torch's C++ takes it for one, too."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = property(lambda self: GPU), property(lambda self: True), property(lambda self: False)

    @staticmethod
    def __new__(cls, inner):
        form = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, device="cpu", **form)

    def __init__(self, inner):
        self.inner, self.streams = inner, {current_stream()}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):  # torch's own would leave `inner` as it was
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def to(self, *args, copy=False, **kwargs):
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return arriving(self.detach().inner.to(dtype or self.dtype, copy=True), non_blocking)
        if not copy and dtype in (None, self.dtype) and layout is None:
            return self
        return torch.ops.aten._to_copy(self, dtype=dtype or self.dtype, memory_format=layout)

    def cpu(self):
        return self.to("cpu")

    def tolist(self):
        return self.cpu().tolist()

    def cuda(self, *_, **__):
        return self

    def new_tensor(self, data, dtype=None, device=None, **more):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or GPU, **more)

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def data_ptr(self):
        return self.inner.data_ptr()

    def record_stream(self, stream):
        self.streams.add(stream)

    def __reduce_ex__(self, protocol):
        return self.cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        new = type(self)(self.inner.clone()).requires_grad_(self.requires_grad)
        new._is_param = getattr(self, "_is_param", False)
        return memo.setdefault(id(self), new)


# ---- what the host waits for -----------------------------------------------------------------------------------------


def step():
    from engine.phases import phase

    return phase.step


def waited(what, upto=None):
    """The host waits: copies posted before arrive."""
    if threading.current_thread() is threading.main_thread():
        forbid()
    frame = sys._getframe(1)
    while frame and not is_ours(Path(frame.f_code.co_filename).absolute()):
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).absolute().relative_to(ROOT)}:{frame.f_lineno}" if frame else "torch"
    thread = threading.current_thread()
    whose = "" if thread is threading.main_thread() else f" in the thread {thread.name.split('_')[0]}"
    waits.append((step(), f"{place} {what}{whose}"))
    if debug_mode[0] in (1, "warn") and what not in ("an event", "the device"):  # torch says nothing of these
        warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, *user_line())
    arrive(upto)


def user_line():
    """The file and the number of the line that has called torch."""
    frame = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or Path(frame.f_code.co_filename).name in DISPATCH:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def is_ours(path):
    return ROOT in path.parents and ".venv" not in path.parts and path.name not in ("fake_gpu.py", "warm.py")


def arrive(upto=None):
    with arriving_now:
        while posted and (upto is None or posted[0][0] <= upto):
            _, host, true = posted.popleft()
            host.copy_(true)


def post(host, true):
    """A copy to pinned memory begins. On a stream of its own it reads the GPU's memory as late as it may."""
    traffic["copies to the host"] += 1
    traffic["bytes to the host"] += true.nbytes
    host.fill_(RUBBISH)
    with arriving_now:
        posted.append((next(numbers), host, true.clone() if current_stream() is usual else true))
    return host


def arriving(true, non_blocking):
    """What a copy to the host returns."""
    if not non_blocking:
        waited("a copy to the host")
        return true
    return post(in_pinned_memory(torch.empty_like(true)), true)


def in_pinned_memory(tensor):
    """A copy whose memory is known as pinned for as long as it lives."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = np.empty(max(size, 0) * tensor.element_size() if tensor.numel() else 0, np.uint8)
    copy = torch.from_numpy(memory).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    address = copy.untyped_storage().data_ptr()
    pinned.add(address)
    pinned_sizes[memory.nbytes] += 1
    weakref.finalize(memory, pinned.discard, address)
    return copy.copy_(tensor)


def is_pinned(tensor, device=None):
    return tensor.untyped_storage().data_ptr() in pinned


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def dispatch(func, args, kwargs):
    flat, spec = tree_flatten((args, kwargs))
    name, wanted = func.name().partition("::")[2].partition(".")[0], kwargs.get("device")
    wanted = torch.device(wanted).type if wanted is not None else ""  # torch's C++ asks for `cpu` and means this GPU
    given = [value for value in flat if is_tensor(value)]
    on_gpu = any(isinstance(value, CudaTensor) for value in given)
    if not on_gpu and wanted != "cuda":
        out = func(*args, **kwargs | ({"pin_memory": False} if kwargs.get("pin_memory") else {}))
        return in_pinned_memory(out) if kwargs.get("pin_memory") else out
    hosts = [value for value in given if not isinstance(value, CudaTensor)]
    whole = [value for value in hosts if value.ndim or name in ("cat", "stack")]
    if whole and name not in TAKES_BOTH:
        shapes = ", ".join(str(tuple(value.shape)) for value in whole)
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} of cuda:0 and cpu {shapes}")
    for value in given:
        if strict[0] and isinstance(value, CudaTensor) and current_stream() not in value.streams:
            raise RuntimeError(f"{name} uses a tensor of another stream, which may give its memory out: record_stream")
    plain = [value.inner if isinstance(value, CudaTensor) else value for value in flat]
    plain = [torch.device("cpu") if isinstance(value, torch.device) else value for value in plain]
    some, more = tree_unflatten(plain, spec)
    more.pop("pin_memory", None)
    if name == "copy_" and not isinstance(args[0], CudaTensor):
        if (kwargs.get("non_blocking") or True in args[2:3]) and is_pinned(args[0]):
            return post(args[0], plain[1])
        waited("a copy to the host")
        return func(*some, **more)
    if name in COPIES and hosts:
        source = hosts[0]
        later = (kwargs.get("non_blocking") or True in args[2:3]) and is_pinned(source)
        if not later:
            waited("a copy from the host")
    elif whole:
        waited("indices of the host")
    if name in READS or reads_a_mask(name, args) or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        waited(name)
    half = next((v.dtype for v in given if v.dtype in (torch.float16, torch.bfloat16)), None)
    if half and name.startswith(IN_FLOAT32):
        widened = tree_map_only(torch.Tensor, torch.Tensor.float, (some, more))
        out = tree_map_only(torch.Tensor, lambda value: value.to(half), func(*widened[0], **widened[1]))
    else:
        with generator.drawing() if DRAWS in func.tags else contextlib.nullcontext():
            out = func(*some, **more)
    stream = current_stream()
    if name not in NO_KERNEL and not func.is_view:
        if stream is usual and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{name} of another thread among the kernels of a step, which it would delay")
        count = launches(name, some)
        (kernels[step()] if stream is usual else stream.launched)[name] += count
        if stream is usual and in_loader():
            of_loader[step()] += count
    wrapped = tree_map_only(torch.Tensor, CudaTensor, out)
    for fresh in tree_flatten(wrapped)[0] if not (func.is_view or func._schema.is_mutable) else ():
        if is_tensor(fresh):
            tell("memory_allocation", fresh.data_ptr())
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if on_gpu else wrapped


def reads_a_mask(name, args):
    """Whether an index is a mask, whose entries a GPU counts for the host."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(is_tensor(index) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def launches(name, args):
    """The kernels of an operation: of a list of tensors one for each of them, where the types, or the shapes of the
    lists, differ. (Of many tensors a GPU takes one kernel for a hundred or so: here one.)"""
    lists = [value for value in args if isinstance(value, (list, tuple)) and value and all(map(is_tensor, value))]
    if not lists or not (name.startswith("_foreach") or name in ("cat", "stack")):
        return 1
    one_type = all(len({value.dtype for value in some}) == 1 for some in lists)
    if name != "_foreach_copy_":
        given = [value for value in args if is_tensor(value)]  # a number on the GPU for the whole list
        one_type = len({value.dtype for value in itertools.chain(*lists, given)}) == 1
    alike = name in ("cat", "stack") or all(
        len({value.shape for value in row}) == 1 for row in zip(*lists, strict=True)
    )
    return 1 if one_type and alike else len(lists[0])


def in_loader():
    """Whether a batch is being made: a frame of data_loader.py is under way."""
    frame = sys._getframe(1)
    while frame and not frame.f_code.co_filename.endswith("data_loader.py"):
        frame = frame.f_back
    return frame is not None


class Gpu(TorchDispatchMode):
    """Sees what is made on the GPU from nothing, or copied there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


plain = inspect.unwrap(Gpu.__torch_dispatch__)
plain.__dynamo_disable = plain  # else torch's compiler is loaded: 2 s in each run


# ---- torch.cuda ------------------------------------------------------------------------------------------------------


def tell(what, *about):
    """To torch's sanitizer, if there is one."""
    from torch.cuda import _gpu_trace

    registry = {"memory_allocation": "MemoryAllocation", "event_record": "EventRecord", "event_wait": "EventWait"}[what]
    getattr(_gpu_trace, f"{registry}Callbacks").fire_callbacks(*about)


class Stream:
    """The kernels of all streams are over at once; that they must wait for each other is what the sanitizer sees."""

    device = GPU

    def __init__(self, *_, **__):
        self.cuda_stream, self.launched = next(numbers), collections.Counter()

    def wait_stream(self, other):
        kernels[step()] += other.launched
        of_loader[step()] += other.launched.total()
        other.launched.clear()
        self.wait_event(other.record_event())

    def wait_event(self, event):
        tell("event_wait", event.cuda_event, self.cuda_stream)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def synchronize(self):
        waited("a stream")


class Generator:
    """The GPU's generator."""

    device = GPU

    def __init__(self):
        self.own = torch.Generator()

    def __getattr__(self, name):  # manual_seed, get_state and the rest
        return getattr(self.own, name)

    @contextlib.contextmanager
    def drawing(self):
        """Let an operation of the CPU draw from this generator."""
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.own.get_state())
        try:
            yield
        finally:
            self.own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(host)


generator, DRAWS = Generator(), torch.Tag.nondeterministic_seeded


class Event:
    def __init__(self, *_, **__):
        self.cuda_event = next(numbers)
        self.step = self.posted = -1

    def record(self, stream=None):
        self.step, self.posted = step(), next(numbers)
        tell("event_record", self.cuda_event, (stream or current_stream()).cuda_stream)

    def synchronize(self):
        if self.step < step():  # what a step before has posted is long over
            arrive(self.posted)
        else:
            waited("an event", self.posted)

    def query(self):
        if self.step == step():
            return False
        arrive(self.posted)
        return True

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, other):
        return 1.0


class Profile(contextlib.AbstractContextManager):
    """Torch's own of a GPU alone refuses to begin where torch knows none: the kernels are those counted here."""

    def __init__(self):
        self.before = self.count()

    def __exit__(self, *_):
        self.taken = self.count() - self.before

    @staticmethod
    def count():
        return sum(counted.total() for counted in kernels.values())

    def events(self):
        devices = {"kernel": torch.autograd.DeviceType.CUDA, "cudaLaunchKernel": torch.autograd.DeviceType.CPU}
        return self.taken * [types.SimpleNamespace(name=name, device_type=which) for name, which in devices.items()]


usual = Stream()
usual.cuda_stream = 0


def current_stream(device=None):
    return getattr(here, "stream", usual)


def set_stream(stream):
    here.stream = stream


@contextlib.contextmanager
def launching():
    """What runs within it is one kernel of the step."""
    before = kernels[step()].copy()
    yield
    kernels[step()] = before + collections.Counter(["a graph"])


@contextlib.contextmanager
def on(stream):
    before, here.stream = current_stream(), stream
    try:
        yield
    finally:
        here.stream = before


def install():
    """From now on this process has a GPU, and so have the threads that it starts."""
    from models import layers

    card = types.SimpleNamespace(name="No GPU", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "_lazy_init": None,
        "is_initialized": True, "mem_get_info": (70 << 30, 80 << 30), "get_device_properties": card,
        "get_device_name": card.name, "max_memory_allocated": 0, "max_memory_reserved": 0, "memory_reserved": 0,
        "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream, torch.cuda.current_stream = (
        Stream,
        Event,
        on,
        current_stream,
    )
    layers.HAS_TRITON = False  # its kernels would be given addresses of the host
    torch.cuda.synchronize = lambda device=None: waited("the device")
    torch.cuda.set_sync_debug_mode = lambda mode: debug_mode.__setitem__(0, mode)
    torch.cuda.get_sync_debug_mode = lambda: debug_mode[0]
    torch.cuda.default_generators, torch.cuda._initialized = (generator,), True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.nccl = types.SimpleNamespace(version=lambda: (0, 0, 0))
    torch._C._activate_gpu_trace = lambda: None
    torch._C._cuda_getDevice, torch.cuda.device = lambda: 0, lambda device=None: contextlib.nullcontext()
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.cuda.empty_cache = lambda: waited("the return of cached memory")
    of_both, host = torch.profiler.profile, torch.profiler.ProfilerActivity.CPU
    # With both, torch prints a stack for each operation that it cannot time on the GPU: minutes of them.
    torch.profiler.profile = lambda activities: of_both(activities=[host]) if host in activities else Profile()
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = lambda self, device=None: in_pinned_memory(self), is_pinned
    begin_autocast, begin_thread = torch.autocast.__init__, threading.Thread._bootstrap_inner

    def autocast(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        begin_autocast(self, "cpu", dtype or torch.bfloat16, enabled, cache_enabled)

    def begin_on_gpu(self):  # a mode belongs to its thread; what the project enters there comes after it
        with Gpu():
            begin_thread(self)

    torch.autocast.__init__, threading.Thread._bootstrap_inner = autocast, begin_on_gpu
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.to` must not keep a parameter of the host
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a copy that the mode sees
    Gpu().__enter__()


def report():
    return json.dumps(
        {"waits": waits, "kernels": kernels, "of_loader": of_loader, "traffic": traffic, "pinned": pinned_sizes}
    )


if __name__ == "__main__":
    sys.argv, sys.path[:1] = sys.argv[1:], [str(Path(sys.argv[1]).absolute().parent), str(ROOT)]
    install()
    if os.environ.get("FAKE_GRAPHS"):
        from tests.kit import recording

        recording.install_on(sys.modules[__name__])
        strict[0], forbid = False, recording.forbid
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        print("FAKE", report())
