"""TLS between the parts of a run: who has its files is let in, and everybody else reads which side to change."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from pydantic import ValidationError

from streamrl_jax.bridge.manifest import pack
from streamrl_jax.bridge.pull import PullError, pull
from streamrl_jax.bridge.store import WeightStore
from streamrl_jax.cli import main
from streamrl_jax.config_security import SecuritySection
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net, tls
from streamrl_jax.gen.client import InstanceClient, InstanceError
from streamrl_jax.gen.handshake import refusal
from streamrl_jax.gen.service import GenerationService, Identity
from streamrl_jax.proto import streamrl_pb2_grpc as rpc
from streamrl_jax.types import Fence, Hello
from tests.fakes import FakeEngine

FENCE = Fence("run", 0)
RUN, OTHER = tls.make("streamrl-run"), tls.make("streamrl-other")
EXPIRED = tls.make("streamrl-run", days=-0.02)


def access(material: tls.Material, *, mutual: bool = False) -> net.Access:
    """TLS on loopback too, so that it can be seen here."""
    return net.Access(
        "secret",
        material.ca,
        material.certificate,
        material.key,
        material.name,
        everywhere=True,
        mutual=mutual,
    )


TLS, MUTUAL, PLAIN = access(RUN), access(RUN, mutual=True), net.Access("secret")
NO_CERTIFICATE = replace(TLS, certificate=b"", key=b"")
OTHERS_CERTIFICATE = replace(TLS, certificate=OTHER.certificate, key=OTHER.key)


@asynccontextmanager
async def instance(server_access: net.Access) -> AsyncIterator[str]:
    """A service, and its address."""
    service = GenerationService(FakeEngine(), Identity("a", 2, "host"))
    server = net.make_server(server_access)
    rpc.add_StreamGenerationServicer_to_server(service, server)
    rpc.add_WeightStoreServicer_to_server(WeightStore(lambda: None, dict), server)
    address = net.bind(server, "127.0.0.1:0", server_access)
    await server.start()
    life = asyncio.create_task(service.run())
    try:
        yield address
    finally:
        await server.stop(None)
        life.cancel()


@pytest.mark.parametrize(
    ("server", "client"), [(TLS, TLS), (MUTUAL, TLS), (TLS, NO_CERTIFICATE), (PLAIN, PLAIN)]
)
def test_two_sides_with_the_same_files_come_together(server: net.Access, client: net.Access) -> None:
    async def scenario() -> None:
        async with instance(server) as address:
            caller = InstanceClient(address, client)
            assert (await caller.status())[1].name == "a"
            await (await caller.open(Hello(FENCE))).close()
            assert await refusal(address, client) == ""
            await caller.close()

    asyncio.run(scenario())


@pytest.fixture(autouse=True)
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not hide why a call was refused."""
    monkeypatch.setattr("streamrl_jax.gen.handshake._BOUND_S", 30.0)


@pytest.mark.parametrize(
    ("server", "client", "told"),
    [
        (TLS, access(OTHER), r"signed by another authority.*security\.ca_file"),
        (TLS, replace(access(OTHER), ca="# Autorità\n".encode() + OTHER.ca), r"signed by another authority"),
        (TLS, replace(TLS, name="streamrl-else"), r"another name than 'streamrl-else'.*security\.ca_file"),
        (access(EXPIRED), access(EXPIRED), r"not valid now \(certificate has expired\).*streamrl certs"),
        (TLS, PLAIN, r"the server speaks TLS and this side called in plain text; set security\.tls"),
        (PLAIN, TLS, r"the server speaks plain text and this side called with TLS; set security\.tls"),
        (MUTUAL, NO_CERTIFICATE, r"asks for a certificate and this side has none.*security\.cert_file"),
        (MUTUAL, OTHERS_CERTIFICATE, r"refused this side's certificate.*security\.cert_file"),
        (MUTUAL, PLAIN, r"the server speaks TLS and this side called in plain text"),
        (TLS, replace(TLS, token="wrong"), r"no valid token.*security\.token_file"),
        (TLS, replace(TLS, token=""), r"no valid token.*security\.token_file"),
    ],
)
def test_what_does_not_fit_is_told_at_once_and_is_not_tried_again(
    server: net.Access, client: net.Access, told: str, tmp_path: Path
) -> None:
    manifest, _ = pack(FENCE, 0, "Fake", {})

    async def scenario() -> None:
        async with instance(server) as address:
            caller = InstanceClient(address, client)
            for call in (caller.status(), caller.open(Hello(FENCE))):
                with pytest.raises(InstanceError, match=told) as caught:
                    await call
                assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED and not caught.value.transient
            await caller.close()
            whole = replace(manifest, total_bytes=4)
            with pytest.raises(PullError, match=told):
                await pull(address, whole, 240.0, access=client, directories=[tmp_path])

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_one_that_is_down_is_not_taken_for_one_that_refuses() -> None:
    async def scenario() -> None:
        async with instance(TLS) as address:
            pass
        for client in (TLS, PLAIN):
            caller = InstanceClient(address, client)
            with pytest.raises(InstanceError) as caught:
                await caller.status()
            assert caught.value.transient
            await caller.close()

    asyncio.run(scenario())


def test_what_is_encrypted_follows_from_the_address() -> None:
    auto = replace(TLS, everywhere=False)
    for loopback in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert not auto.encrypts(loopback) and TLS.encrypts(loopback)
    for beyond in ("0.0.0.0:1", "10.0.0.1:1", "node-b:1", "[fe80::1]:1"):
        assert auto.encrypts(beyond) and not PLAIN.encrypts(beyond)
        net.check_listen(beyond, auto)
        net.check_call(beyond, auto)
        with pytest.raises(UserError, match=r"security\.token_file"):
            net.check_listen(beyond, replace(auto, token=""))
        with pytest.raises(UserError, match=r"security\.cert_file"):
            net.check_listen(beyond, replace(auto, certificate=b"", key=b""))


def test_a_server_beyond_loopback_is_tls_with_the_same_access() -> None:
    auto = replace(MUTUAL, everywhere=False)

    async def scenario() -> None:
        server = net.make_server(auto)
        service = GenerationService(FakeEngine(), Identity("a", 2, "host"))
        rpc.add_StreamGenerationServicer_to_server(service, server)
        address = net.bind(server, "0.0.0.0:0", auto)
        await server.start()
        caller = InstanceClient(address, auto)
        assert (await caller.status())[1].name == "a"
        await caller.close()
        plain = InstanceClient(f"127.0.0.1:{address.rpartition(':')[2]}", auto)
        with pytest.raises(InstanceError, match="the server speaks TLS"):
            await plain.status()
        await plain.close()
        await server.stop(None)

    asyncio.run(scenario())


# --- files ------------------------------------------------------------------------------------------------


def written(material: tls.Material, directory: Path) -> list[str]:
    tls.write(material, directory)
    return [str(directory / name) for name in (tls.CA_FILE, tls.CERT_FILE, tls.KEY_FILE)]


def test_files_are_the_owners_alone_and_give_back_the_material(tmp_path: Path) -> None:
    files = written(RUN, tmp_path / "tls")
    assert tls.read(*files) == RUN and RUN.name == "streamrl-run"
    assert all(stat.S_IMODE(Path(file).stat().st_mode) == 0o600 for file in files)
    assert len(list((tmp_path / "tls").iterdir())) == 3
    assert "PRIVATE" not in repr(RUN) + repr(TLS) and "secret" not in repr(TLS)


def test_files_that_cannot_work_are_refused_where_they_are_read(tmp_path: Path) -> None:
    ca, certificate, key = written(RUN, tmp_path / "run")
    _, other_certificate, other_key = written(OTHER, tmp_path / "other")
    with pytest.raises(UserError, match=r"security\.key_file = .*other/key.pem' is not the key of"):
        tls.read(ca, certificate, other_key)
    with pytest.raises(UserError, match=r"security\.cert_file = .*other/cert.pem' was not signed by"):
        tls.read(ca, other_certificate, other_key)
    with pytest.raises(UserError, match=r"security\.ca_file = .*key.pem' holds no certificate"):
        tls.read(key)
    with pytest.raises(UserError, match=r"security\.key_file = .*cert.pem' holds no private key"):
        tls.read(ca, certificate, certificate)
    with pytest.raises(UserError, match=r"security\.ca_file = .*nowhere' cannot be read"):
        tls.read(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="given together"):
        tls.read(ca, certificate)
    with pytest.raises(UserError, match=r"security\.ca_file = .*has expired.*streamrl certs"):
        tls.read(*written(EXPIRED, tmp_path / "expired"))


def test_a_resumed_run_keeps_its_certificates_while_they_last(tmp_path: Path) -> None:
    made = tls.for_run("streamrl-run", tmp_path)
    assert tls.for_run("streamrl-run", tmp_path) == made
    soon_over = tls.make("streamrl-run", days=5)
    tls.write(soon_over, tmp_path)
    assert tls.for_run("streamrl-run", tmp_path) == soon_over  # who only calls the run changes nothing
    renewed = tls.for_run("streamrl-run", tmp_path, renew=True)
    assert (renewed.ends - made.ends).days >= 0
    for broken in ("cut off by a full disk", "-----BEGIN CERTIFICATE-----\nMII"):
        (tmp_path / tls.CERT_FILE).write_text(broken)
        with pytest.raises(UserError, match=r"Remove that directory, and the run makes new ones"):
            tls.for_run("streamrl-run", tmp_path)


def test_the_command_makes_what_run_and_instances_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "shared"
    assert main(["certs", str(directory), "--host", "node-b", "--host", "10.0.0.2"]) == 0
    printed = capsys.readouterr().out
    for key in ("ca_file", "cert_file", "key_file", "token_file"):
        assert f"security.{key}={directory}" in printed
    token, ca, certificate, key = (
        str(directory / name) for name in ("token", "ca.pem", "cert.pem", "key.pem")
    )
    found = net.Access.from_files(net.AccessFiles(token, ca, certificate, key))
    assert found.name == "streamrl" and len(found.token) > 30 and found.encrypts("node-b:1")
    assert stat.S_IMODE((directory / "token").stat().st_mode) == 0o600
    assert main(["certs", str(directory)]) == 2
    assert "holds ca.pem, cert.pem, key.pem, token already" in capsys.readouterr().err
    for wrong in (["--days", "0"], ["--days", "nan"], ["--name", "two words"], ["--host", ""]):
        assert main(["certs", str(tmp_path / "wrong"), *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tls": "on", "insecure": True}, "choose one"),
        ({"tls": "off", "mutual_tls": True}, r"mutual_tls would not be used, since tls = 'off'"),
        ({"insecure": True, "ca_file": "ca.pem"}, r"ca_file would not be used, since insecure = true"),
        ({"ca_file": "ca.pem", "cert_file": "cert.pem"}, "given together"),
        ({"cert_file": "cert.pem", "key_file": "key.pem"}, "without ca_file"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SecuritySection.model_validate(settings)
