"""kubernetes/: manifests that the published schemas accept, and pods that are stopped as a kubelet stops them.

The schemas are those of the package kubeflow-trainer-api, which Kubeflow Trainer publishes with each version, made of
the same OpenAPI description as its custom resources, with Kubernetes' own types in it. A field that they do not know is
an error here, as for `kubectl apply --validate=strict`.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, free_port, launching, succeed, wait_until
from hosts import two_hosts

from engine import errors

FILES = {
    name: list(yaml.safe_load_all((ROOT / "kubernetes" / name).read_text())) for name in ("job.yaml", "trainjob.yaml")
}
MODELS = {
    ("v1", "PersistentVolumeClaim"): "IoK8sApiCoreV1PersistentVolumeClaim",
    ("v1", "Service"): "IoK8sApiCoreV1Service",
    ("batch/v1", "Job"): "IoK8sApiBatchV1Job",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
}
RESERVED = {f"PET_{name}" for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
"""What Kubeflow's webhook refuses in a TrainJob's env, because it sets them."""


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in FILES[name] if document["kind"] == kind]
    return found


# ---- the schemas --------------------------------------------------------------------------------------------------


def strict(node: Any) -> Any:
    """The schema, where a field that is not named is an error, and null is no value."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    others = [each for each in node.get("anyOf", ()) if each != {"type": "null"}]
    node = {**node, **others[0]} if len(others) == 1 else node
    node = {key: strict(value) for key, value in node.items() if key != "anyOf" or len(others) != 1}
    return {**node, "additionalProperties": False} if node.get("type") == "object" and "properties" in node else node


@functools.cache
def validator(model: str) -> Any:
    jsonschema, api = pytest.importorskip("jsonschema"), pytest.importorskip("kubeflow_trainer_api.models")
    schema = strict(getattr(api, model).model_json_schema())
    schema["$defs"]["IoK8sApimachineryPkgApiResourceQuantity"] = {"type": "string"}  # published as a thing of any form
    return jsonschema.Draft202012Validator(schema)


def problems(document: dict[str, Any]) -> list[str]:
    """What an API server would refuse: by the schema of its kind, and by rules that no schema holds."""
    model = MODELS[document["apiVersion"], document["kind"]]
    found = [f"{error.json_path}: {error.message}" for error in validator(model).iter_errors(document)]
    name = document["metadata"]["name"]
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 63:
        found.append(f"$.metadata.name: {name} is no label of RFC 1035")
    trainer = document["spec"].get("trainer", {})
    if reserved := sorted(RESERVED & {each["name"] for each in trainer.get("env", ())}):
        found.append(f"$.spec.trainer.env: {reserved} are reserved")
    if 0 in (trainer.get("numNodes"), trainer.get("numProcPerNode")):
        found.append("$.spec.trainer: a number of nodes or processes is too small")
    for policy in policies(document):
        for rule in policy["rules"]:
            values = rule.get("onExitCodes", {}).get("values", [1])
            if values != sorted({*values}) or 0 in values:
                found.append(f"podFailurePolicy: {values} are not exit codes of failures in their order")
    return found


def policies(node: Any) -> list[dict[str, Any]]:
    """Every podFailurePolicy below it."""
    if isinstance(node, list):
        return [found for each in node for found in policies(each)]
    if not isinstance(node, dict):
        return []
    own = [node["podFailurePolicy"]] if "podFailurePolicy" in node else []
    return own + policies([*node.values()])


@pytest.mark.parametrize(
    ("name", "document"), [pytest.param(n, d, id=f"{n}-{d['kind']}") for n, all in FILES.items() for d in all]
)
def test_the_published_schemas_accept_the_manifests(name, document):
    assert not problems(document)


TYPOS = [  # kind, where, what is written there, what is said of it
    ("Job", "spec completionmode", "Indexed", "'completionmode' was unexpected"),
    ("Job", "spec completions", "2", "'2' is not of type 'integer'"),
    ("Job", "spec template spec containers 0 envs", [], "'envs' was unexpected"),
    ("Job", "spec template spec containers 0 resources limits cpu", 2, "2 is not of type 'string'"),
    ("Job", "spec podFailurePolicy rules 1 onExitCodes values", [75, 0], "[75, 0] are not exit codes"),
    ("Service", "spec publishNotReady", True, "'publishNotReady' was unexpected"),
    ("Service", "metadata name", "Lockstep", "no label of RFC 1035"),
    ("PersistentVolumeClaim", "spec accessModes", "ReadWriteMany", "is not of type 'array'"),
    ("TrainJob", "spec runtimeRef", None, "is not of type 'object'"),
    ("TrainJob", "spec trainer nodes", 2, "'nodes' was unexpected"),
    ("TrainJob", "spec trainer numProcPerNode", 0, "too small"),
    ("TrainJob", "spec trainer env", [{"name": "PET_NNODES", "value": "2"}], "are reserved"),
    ("TrainJob", "spec podTemplateOverrides", [], "'podTemplateOverrides' was unexpected"),
    ("TrainingRuntime", "spec template spec replicatedJobs 0 template spec template spec container", [],
     "'container' was unexpected"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "where", "value", "said"), TYPOS)
def test_a_planted_mistake_is_found(kind, where, value, said):
    document = copy.deepcopy(of_kind("trainjob.yaml" if kind.startswith("Train") else "job.yaml", kind))
    *path, last = [int(word) if word.isdigit() else word for word in where.split()]
    functools.reduce(lambda node, key: node[key], path, document)[last] = value
    found = problems(document)
    assert any(said in line for line in found), found


def pod_of(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The Job's spec, its pod's spec and its container: of a TrainJob as Kubeflow makes it from the runtime."""
    if name == "job.yaml":
        job = of_kind(name, "Job")["spec"]
        return job, job["template"]["spec"], job["template"]["spec"]["containers"][0]
    runtime, trainer = of_kind(name, "TrainingRuntime")["spec"], of_kind(name, "TrainJob")["spec"]["trainer"]
    job = runtime["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0] | {key: trainer[key] for key in ("image", "command", "args")}


@pytest.mark.parametrize("name", FILES)
def test_the_parts_of_a_manifest_fit_each_other(name):
    job, pod, container = pod_of(name)
    rules = {rule["action"]: rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert {rule["containerName"] for rule in rules.values()} == {container["name"]}
    assert rules["Ignore"]["values"] == [errors.STOPPED, 143], "a stopped run resumes"
    again = {errors.DISTRIBUTED}
    assert {*rules["FailJob"]["values"]} == {1, errors.USAGE, errors.CHECKPOINT, errors.DIVERGED, errors.DATA} - again
    assert pod["restartPolicy"] == "Never", "else a podFailurePolicy is refused"
    volumes, claim = {volume["name"]: volume for volume in pod["volumes"]}, of_kind(name, "PersistentVolumeClaim")
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert container["args"][-1].startswith("/runs/") and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    if name == "job.yaml":
        env = {each["name"]: each.get("value") for each in container["env"]}
        service, whole = of_kind(name, "Service"), of_kind(name, "Job")["metadata"]["name"]
        assert env["NNODES"] == str(job["completions"]) == str(job["parallelism"])
        assert env["MASTER_ADDR"] == f"{whole}-0.{pod['subdomain']}" and pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"] == {"job-name": whole} and service["spec"]["clusterIP"] == "None"
    else:
        runtime, train_job = of_kind(name, "TrainingRuntime"), of_kind(name, "TrainJob")
        assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert train_job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
        replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
        # Else Kubeflow finds no container to tell where it stands.
        assert replicated["name"] == container["name"] == "node"
        labels = replicated["template"]["metadata"]["labels"]
        assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


# ---- a pod that is stopped ----------------------------------------------------------------------------------------

SHORT = ["--mode", "flatten", "device=cpu", "num_workers=0", "virtual_workers=2", "steps=180", "log_every=1"]
"""What is added to the manifest's own arguments."""


def start_pod(launch, name, index, folder, *before, host=None, **more):
    """A pod's container as a kubelet starts it: the manifest's command, arguments and environment."""
    _, _, container = pod_of(name)
    words = [word.replace("/runs", str(folder)) for word in container["command"] + container["args"]]
    env = {each["name"]: each.get("value", "what the secret holds") for each in container["env"]}
    env |= {"JOB_COMPLETION_INDEX": str(index), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": None}
    return launch.start(*before, *words, *SHORT, host=host, **env | more)


def weights(text):
    (found,) = re.findall(r"weights +sha256 ([0-9a-f]{16})", text)
    return found


@pytest.fixture(scope="module")
def straight(once):
    """What a run on one process that nothing happens to ends in."""

    def build(folder):
        with launching() as launch:
            done = succeed(launch.python("train.py", "har", *SHORT, f"save_dir={folder / 'run'}"))
        (folder / "weights").write_text(weights(done.out))

    return (once("kubernetes_straight", build) / "weights").read_text()


def stopped_and_started_again(start, stop, straight):
    """Two pods of `start(index)`, of which `stop(pods)` stops one in the middle, end as the straight run."""
    pods = [start(0), start(1)]
    pods[0].wait_for("step 10/")
    stop(pods)
    done = [pod.wait(20) for pod in pods]  # torchrun's would wait for each other for 300 s
    assert [each.code for each in done] == [errors.STOPPED] * 2, [each.err for each in done]
    (at,) = re.findall(r"Stopped after step (\d+) of 180: SIGTERM", done[0].out + done[1].out)
    assert 10 <= int(at) < 180
    done = [succeed(pod.wait()) for pod in (start(0), start(1))]
    said = done[0].out + done[1].out
    assert re.search(rf"Resuming .*/har/step_{at}.pt: step {at}", said), said
    assert weights(said) == straight


@pytest.mark.slow
def test_two_pods_of_a_trainjob_are_stopped_and_end_as_the_straight_run(launch, tmp_path, straight):
    """With what Kubeflow sets, but for the address, which is this machine's."""

    def start(index):
        nodes = of_kind("trainjob.yaml", "TrainJob")["spec"]["trainer"]["numNodes"]
        pet = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": str(index)}
        pet |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": ports[-1]}
        return start_pod(launch, "trainjob.yaml", index, tmp_path, **pet)

    ports = [free_port()]

    def stop(pods):
        pods[0].signal(signal.SIGTERM)
        ports.append(free_port())

    stopped_and_started_again(start, stop, straight)


def first_process(launch, pod):
    """The pod's process 1, by this machine's number: in a namespace of its own within that of its host."""
    for pid in launch.left_behind():
        numbers = re.search(r"NSpid:(.*)", Path(f"/proc/{pid}/status").read_text())[1].split()
        if len(numbers) == 3 and numbers[-1] == "1" and os.getpgid(pid) == os.getpgid(pod.process.pid):
            return pid
    return None


@pytest.mark.slow
def test_two_pods_of_a_job_are_stopped_and_end_as_the_straight_run(launch, tmp_path, straight):
    """Each on a host of its own, and at first as its process 1, which the kernel spares the signals that it does not
    handle; the second one starts before the first one's name is known, as it may be with a Service's."""
    (address,) = [env["value"] for env in pod_of("job.yaml")[2]["env"] if env["name"] == "MASTER_ADDR"]
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

    with two_hosts() as hosts:

        def start(index):
            pod = start_pod(launch, "job.yaml", index, tmp_path, *alone, host=hosts[index])
            if alone and index == 1:
                pod.wait_for("Launching distributed training")
            named = f"grep -q {address} /etc/hosts || echo {hosts[0].address} {address} >> /etc/hosts"
            hosts[index].run("sh", "-c", named)
            return pod

        def stop(pods):
            wait_until(lambda: first_process(launch, pods[1]))
            os.kill(first_process(launch, pods[1]), signal.SIGTERM)
            alone.clear()

        stopped_and_started_again(start, stop, straight)
