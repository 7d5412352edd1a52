"""Private names of torch are used in few files, and are still there. The docstring of an absent name names its use."""

import ast
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from engine import private
from engine.optim.fused import AdamW
from plugins.parallel import private as parallel_private
from plugins.performance import private as performance_private
from plugins.preflight import private as preflight_private
from plugins.resilience import private as resilience_private

OF_OTHERS = {"_exit", "_current_frames", "_replace", "_asdict", "_fields", "_Unpickler"}
OF_OTHERS |= {f"_foreach_{name}" for name in ("div_", "norm", "lerp_", "add", "add_", "copy_", "mul", "mul_")}
"""Of Python, and torch's documented functions over lists."""


def test_they_are_used_behind_one_fence():
    """The core and each plugin have one file of private names; fused kernels and the backend have theirs."""
    files = [ROOT / "train.py", ROOT / "data_loader.py", *ROOT.glob("engine/**/*.py"), *ROOT.glob("plugins/**/*.py")]
    using = {str(path.relative_to(ROOT)) for path in files if private_names(path)}
    packages = ("engine", *(f"plugins/{name}" for name in ("parallel", "performance", "preflight", "resilience")))
    fenced = {f"{package}/private.py" for package in packages}
    assert using == fenced | {"engine/optim/fused.py", "plugins/performance/shm_backend.py"}


def private_names(path):
    """The private attributes in a file that are neither its own nor those of others."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in attributes if ast.unparse(node.value) == "self"}
    return {node.attr for node in attributes if re.match("_[^_]", node.attr)} - own - OF_OTHERS


@pytest.fixture
def world():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_tells_what_it_is_made_of_and_what_it_waits_for(world):
    net = DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    record = parallel_private.ddp_record(net)
    assert record["backend_name"] == "gloo" and record["num_parameter_tensors"] == 4
    assert record["total_parameter_size_bytes"] == 48
    net.module.forward = lambda x: net.module[0](x)  # the other layer has no gradient
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        resilience_private.check_all_reduced(net)


def test_the_workspaces_of_cublas_can_be_freed():
    """A torch without CUDA lacks the function, but declares it."""
    declared = (Path(torch.__file__).parent / "_C/__init__.pyi").read_text()
    assert "def _cuda_clearCublasWorkspaces() -> None" in declared


def test_the_allocator_and_the_generator_forget_a_record():
    """A torch without CUDA lacks the functions, but declares them."""
    declared = (Path(torch.__file__).parent / "_C/__init__.pyi").read_text()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert f"def {name}(device: _int, mempool_id: tuple[_int, _int]) -> None" in declared
        assert name in Path(performance_private.__file__).read_text()
    assert torch.Generator().clone_state() and torch.Generator.graphsafe_set_state


def test_layers_and_what_hangs_on_them():
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("cache", torch.zeros(1), persistent=False)
    norm.register_forward_pre_hook(print)
    assert private.non_persistent_buffers(norm) == {"cache"} and preflight_private.forward_pre_hooks(norm) == [print]
    own = private.own_buffers(norm)
    norm.running_mean = torch.ones(2)
    assert own["running_mean"] is norm.running_mean and own.keys() == dict(norm.named_buffers()).keys()
    assert isinstance(norm, preflight_private.BATCH_NORM) and isinstance(
        nn.InstanceNorm2d(2), preflight_private.INSTANCE_NORM
    )
    assert isinstance(norm, private.NORM_WITH_STATISTICS) and isinstance(nn.Dropout(), private.DROPOUT)


def test_bf16_of_the_cpu_can_be_hidden(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert private.cpu_has_bf16()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
    assert not private.cpu_has_bf16()


def test_the_optimizer_has_its_kernel():
    optimizer = AdamW([weight := torch.ones(3, requires_grad=True)], fused=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1 and (weight < 1).all()


def test_agents_meet_at_torchs_barrier():
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    class Agent:
        _exit_barrier, waited = (lambda self: self.waited.append(self._exit_barrier_timeout)), []

    resilience_private.meet_other_agents(Agent(), most_s=3)
    assert Agent.waited == [3] and "_exit_barrier_timeout" in SimpleElasticAgent._exit_barrier.__code__.co_names


def test_gradients_that_fsdp2_has_kept_whole_are_added_up_after_the_backward_pass(world):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in (net[0], net):
        fully_shard(module, mesh=mesh)
    net.set_requires_gradient_sync(False)
    net(torch.ones(1, 2)).sum().backward()
    assert net[1].weight.grad is None and parallel_private.unsharded(net)["1.bias"].grad == 1
    net.set_requires_gradient_sync(True)
    parallel_private.reduce_gradients(net)
    assert net[1].bias.grad.to_local() == 1 and net[0].bias.grad is None
