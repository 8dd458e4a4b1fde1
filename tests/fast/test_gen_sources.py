"""Weights come from the version's own file or from a weight store, whatever a caller names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl_jax.bridge.blob import BlobWriter
from streamrl_jax.bridge.manifest import pack
from streamrl_jax.gen import net
from streamrl_jax.gen.sources import SourceRefused, Sources, local_peer
from streamrl_jax.types import Fence, Manifest, WeightSource

FENCE = Fence("run-1", 2)
MANIFEST, BLOB = pack(FENCE, 3, "Tiny", {"w": np.arange(16, dtype=np.float32)})


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where blobs may lie."""
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


@pytest.fixture
def blob(shared: Path) -> Iterator[Path]:
    """What a publisher writes."""
    with BlobWriter(shared, FENCE, 3, MANIFEST.total_bytes) as writer:
        writer.write(0, bytes(BLOB))
        yield writer.seal()


def fault(shared: Path, source: WeightSource, manifest: Manifest = MANIFEST, **options: object) -> str:
    """Why a source is refused; empty: it is taken."""
    local, stores = bool(options.get("local", True)), options.get("stores", ())
    sources = Sources(net.OPEN, [shared], [shared], stores)  # type: ignore[arg-type]
    try:
        sources.check(source, manifest, local_caller=local)
    except SourceRefused as error:
        return str(error)
    return ""


def test_the_publishers_own_file_is_taken(shared: Path, blob: Path) -> None:
    assert fault(shared, WeightSource(str(blob))) == ""


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/shm/../../etc/passwd",
        "{shared}/../secret",
        "{shared}/../shm/{name}",
        "{shared}/sub/{name}",
        "{parent}/{name}",
        "{name}",
        "",
        "/",
        "{shared}",
    ],
)
def test_no_other_directory_is_read(shared: Path, blob: Path, path: str) -> None:
    named = path.format(shared=shared, name=blob.name, parent=shared.parent)
    assert fault(shared, WeightSource(named or "/"))


def test_no_other_name_size_kind_or_owner_is_read(shared: Path, blob: Path) -> None:
    for name in (
        "passwd",
        blob.name.replace("-v3.", "-v4."),
        blob.name.replace("run-1-2", "run-1-1"),
        blob.name.replace("run-1", "run-2"),
        blob.name.replace(".bin", ".part"),
        blob.name.replace("-v3.", "-v33."),
    ):
        other = shared / name
        other.write_bytes(blob.read_bytes())
        assert "has not the name of version 3" in fault(shared, WeightSource(str(other)))
    assert "manifest.total_bytes = 65" in fault(
        shared, WeightSource(str(blob)), replace(MANIFEST, total_bytes=65)
    )
    link = shared / blob.name.replace(".bin", "0.bin")
    link.symlink_to(blob)
    assert "no regular file" in fault(shared, WeightSource(str(link)))
    pipe = shared / blob.name.replace(".bin", "1.bin")
    os.mkfifo(pipe)
    assert "no regular file" in fault(shared, WeightSource(str(pipe)))
    gone = shared / blob.name.replace(".bin", "2.bin")
    assert "cannot be read" in fault(shared, WeightSource(str(gone)))
    blob.chmod(0o666)
    assert "mode 666; only this user" in fault(shared, WeightSource(str(blob)))


def test_a_directory_that_is_a_link_is_not_followed(shared: Path, blob: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(shared)
    assert "not in a directory" in fault(shared, WeightSource(str(link / blob.name)))


@pytest.mark.parametrize(
    ("address", "local", "told"),
    [
        ("127.0.0.1:5000", True, ""),
        ("localhost:5000", True, ""),
        ("[::1]:5000", True, ""),
        ("0.0.0.0:5000", True, ""),
        ("trainer-0.cluster.local:5000", False, ""),
        ("10.0.0.7:5000", False, ""),
        ("[2001:db8::1]:5000", False, ""),
        ("127.0.0.1:22", False, "is on this machine, and the caller is not"),
        ("127.8.9.1:22", False, "is on this machine"),
        ("localhost:22", False, "is on this machine"),
        ("LOCALHOST:22", False, "is on this machine"),
        ("ip6-localhost:22", False, "is on this machine"),
        ("redis.localhost:22", False, "is on this machine"),
        ("[::1]:22", False, "is on this machine"),
        ("[::ffff:127.0.0.1]:22", False, "is on this machine"),
        ("0.0.0.0:22", False, "is on this machine"),
        ("127.1:22", False, "no host and port of a weight store"),
        ("0x7f000001:22", False, "no host and port of a weight store"),
        ("2130706433:22", False, "no host and port of a weight store"),
        ("169.254.169.254:80", True, "a special address"),
        ("[fe80::1]:80", True, "a special address"),
        ("224.0.0.1:80", True, "a special address"),
        ("255.255.255.255:80", True, "a special address"),
        ("unix:/var/run/docker.sock", True, "is no HOST:PORT"),
        ("unix:/var/run/docker.sock:1", True, "no host and port of a weight store"),
        ("dns:///trainer:80", True, "no host and port of a weight store"),
        ("ipv4:127.0.0.1:80", True, "no host and port of a weight store"),
        ("user@trainer:80", True, "no host and port of a weight store"),
        ("trainer:0", True, "no host and port of a weight store"),
        ("trainer", True, "is no HOST:PORT"),
        ("", True, "is no HOST:PORT"),
    ],
)
def test_a_store_is_a_host_and_port_that_the_caller_could_reach_itself(
    shared: Path, address: str, local: bool, told: str
) -> None:
    found = fault(shared, WeightSource(address=address), local=local)
    assert (told in found) if told else found == ""


def test_stores_can_be_listed(shared: Path) -> None:
    stores = ("trainer-*", "10.0.0.7")
    for allowed in ("trainer-3:1", "10.0.0.7:1"):
        assert fault(shared, WeightSource(address=allowed), stores=stores) == ""
    for other in ("10.0.0.8:1", "127.0.0.1:1", "x-trainer-3:1"):
        assert "not among security.stores" in fault(shared, WeightSource(address=other), stores=stores)


def test_a_caller_on_this_machine_is_told_from_one_elsewhere() -> None:
    for here in ("ipv4:127.0.0.1:50", "ipv6:%5B::1%5D:50", "unix:/tmp/x", "ipv4:127.9.9.9:1"):
        assert local_peer(here)
    for elsewhere in ("ipv4:192.0.2.1:50", "ipv6:%5B2001:db8::7%5D:50", "nonsense", ""):
        assert not local_peer(elsewhere)
