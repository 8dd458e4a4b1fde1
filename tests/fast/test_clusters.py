"""The recipes under configs/clusters: their syntax, their commands and keys, and the fields of their resources.

No cluster is at hand, so what can be held against something is: shell scripts against bash, every `streamrl` command
line in them against the parser and the configuration, resources against the fields that the public API references
require (Kubernetes v1, batch/v1 Job; JobSet v1alpha2; LeaderWorkerSet v1) and against each other.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl_jax.cli import COMMANDS, _parse, split_command
from streamrl_jax.config_io import parse_override
from streamrl_jax.config_schema import key_above
from streamrl_jax.gen.tls import CA_FILE, CERT_FILE, KEY_FILE

CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"
SCRIPTS = sorted(CLUSTERS.rglob("*.sbatch"))
MANIFESTS = sorted(CLUSTERS.rglob("*.yaml"))

# Required fields by apiVersion and kind, dotted; [] goes into each entry of a list.
REQUIRED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("v1", "Service"): ("metadata.name", "spec.selector", "spec.ports[].port"),
    ("v1", "PersistentVolumeClaim"): ("metadata.name", "spec.accessModes", "spec.resources.requests.storage"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): (
        "metadata.name",
        "spec.replicatedJobs[].name",
        "spec.replicatedJobs[].replicas",
        "spec.replicatedJobs[].template.spec.template.spec.containers",
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): (
        "metadata.name",
        "spec.replicas",
        "spec.leaderWorkerTemplate.size",
        "spec.leaderWorkerTemplate.workerTemplate.spec.containers",
    ),
}
POD = ("containers[].name", "containers[].image", "volumes[].name")
# Keys that a level may have, so that a misspelt one is found.
KNOWN: Mapping[str, frozenset[str]] = {
    "JobSet.spec": frozenset({"network", "failurePolicy", "successPolicy", "replicatedJobs", "suspend"}),
    "JobSet.spec.network": frozenset({"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}),
    "LeaderWorkerSet.spec": frozenset(
        {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"}
    ),
    "LeaderWorkerSet.spec.leaderWorkerTemplate": frozenset(
        {"leaderTemplate", "workerTemplate", "size", "restartPolicy"}
    ),
    "Service.spec": frozenset({"clusterIP", "publishNotReadyAddresses", "selector", "ports"}),
}
POD_KEYS = frozenset(
    {"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes", "serviceAccountName"}
)
CONTAINER_KEYS = frozenset({"name", "image", "command", "args", "env", "ports", "resources", "volumeMounts"})


def resources() -> list[dict[str, Any]]:
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text())]


def at(node: Any, path: str) -> list[Any]:
    """What a dotted path leads to; [] goes into each entry."""
    found = [node]
    for part in path.split("."):
        name, entries = part.removesuffix("[]"), part.endswith("[]")
        found = [one[name] for one in found]
        if entries:
            found = [entry for one in found for entry in one]
    return found


def pods(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod specifications in a resource."""
    if resource["kind"] == "JobSet":
        yield from at(resource, "spec.replicatedJobs[].template.spec.template.spec")
    if resource["kind"] == "LeaderWorkerSet":
        yield from at(resource, "spec.leaderWorkerTemplate.workerTemplate.spec")


def shells() -> Iterator[tuple[str, str]]:
    """Every shell script of the recipes, with its name."""
    for path in SCRIPTS:
        yield path.name, path.read_text()
    for resource in resources():
        for pod in pods(resource):
            for container in pod["containers"]:
                assert container["command"] == ["bash", "-c"]
                yield f"{resource['metadata']['name']}/{container['name']}", container["args"][0]


def commands(script: str) -> Iterator[list[str]]:
    """The words of every `streamrl` command line, continued lines joined, arrays spread."""
    arrays = dict(re.findall(r"^\s*(\w+)=\((.*)\)$", script, re.MULTILINE))
    for line in script.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#") or not (found := re.search(r"\bstreamrl (?=[a-z])(.*)", line)):
            continue
        text = re.sub(r'"\$\{(\w+)\[@\]\}"', lambda match: arrays[match[1]], found[1])
        words = shlex.split(text.removesuffix("&"))
        yield [re.sub(r"\$\w+", "1", word) for word in words if word != "$@"]


@pytest.mark.parametrize(("name", "script"), list(shells()))
def test_the_scripts_are_bash(name: str, script: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), name


def test_every_command_is_one_that_streamrl_knows_with_keys_that_exist() -> None:
    seen: list[str] = []
    for _, script in shells():
        for words in commands(script):
            name, rest = split_command(words)
            arguments = _parse(name, COMMANDS[name], rest)
            for override in arguments.overrides:
                parse_override(override)
                key = key_above(override.partition("=")[0])
                assert key is not None, f"{override}: there is no such key"
            seen.append(name)
    assert {name: seen.count(name) for name in seen} == {"gen": 2, "train": 2}


@pytest.mark.parametrize(
    "resource", resources(), ids=lambda found: f"{found['kind']}-{found['metadata']['name']}"
)
def test_resources_have_the_fields_that_their_api_requires_and_no_unknown_ones(
    resource: dict[str, Any],
) -> None:
    for path in REQUIRED[resource["apiVersion"], resource["kind"]]:
        assert all(value not in (None, "", [], {}) for value in at(resource, path)), path
    for level, known in KNOWN.items():
        kind, _, path = level.partition(".")
        if kind == resource["kind"]:
            assert all(set(found) <= known for found in at(resource, path)), level
    for pod in pods(resource):
        for path in POD:
            assert all(at(pod, path)), path
        assert set(pod) <= POD_KEYS
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == set(at(pod, "volumes[].name")), "each volume is mounted, and each mount has one"
        assert "/dev/shm" in at(pod, "containers[].volumeMounts[].mountPath")
        for container in pod["containers"]:
            assert set(container) <= CONTAINER_KEYS


def test_an_indexed_job_has_as_many_pods_as_the_trainer_has_processes() -> None:
    (jobset,) = (found for found in resources() if found["kind"] == "JobSet")
    (job,) = at(jobset, "spec.replicatedJobs[].template.spec")
    (script,) = at(jobset, "spec.replicatedJobs[].template.spec.template.spec.containers[].args[]")
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert f"trainer.distributed.processes={job['completions']} " in script


def test_names_that_meet_are_the_same_on_both_sides() -> None:
    by_kind = {found["kind"]: found for found in resources()}
    jobset, service, workers = by_kind["JobSet"], by_kind["Service"], by_kind["LeaderWorkerSet"]
    (trainer,) = at(jobset, "spec.replicatedJobs[].template.spec.template.spec.containers[]")
    (instance,) = at(workers, "spec.leaderWorkerTemplate.workerTemplate.spec.containers[]")
    (port,) = at(service, "spec.ports[].port")
    assert f"--join {service['metadata']['name']}:{port} " in instance["args"][0]
    assert f"control.listen=$LEADER:{port}" in trainer["args"][0]
    (job,) = at(jobset, "spec.replicatedJobs[]")
    leader = next(entry["value"] for entry in trainer["env"] if entry["name"] == "LEADER")
    assert (
        leader == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    )
    selector = service["spec"]["selector"]
    assert selector["jobset.sigs.k8s.io/jobset-name"] == jobset["metadata"]["name"]
    assert selector["jobset.sigs.k8s.io/replicatedjob-name"] == job["name"]
    assert f"gen.min_instances={workers['spec']['replicas']} " in trainer["args"][0]
    gpus = instance["resources"]["limits"]["nvidia.com/gpu"]
    assert f"gen.tensor_parallel_size={gpus}" in instance["args"][0]
    for container in (trainer, instance):
        given = {entry["name"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX", "START"}
        used = set(re.findall(r"\$\{?(\w+)", container["args"][0]))
        assert used <= given, "each variable is set"
        for file in (CA_FILE, CERT_FILE, KEY_FILE, "token"):
            assert f"/etc/streamrl-access/{file}" in container["args"][0]


def test_every_variable_of_the_batch_script_is_set() -> None:
    (script,) = (path.read_text() for path in SCRIPTS)
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    used = set(re.findall(r"\$\{?#?([A-Za-z_]\w*)", code))
    given = set(re.findall(r"^\s*(\w+)=", code, re.MULTILINE)) | {"NODES"}
    assert used - given == {"SLURM_JOB_NODELIST"}, "the only one that comes from SLURM"
