"""`streamrl pool` and instances that dial in, against the admin service of a controller that really runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from streamrl_jax.bridge.blob import SHARED_MEMORY, Owner, blob_stem
from streamrl_jax.cli import main
from streamrl_jax.config import Config
from streamrl_jax.config_io import dump_config
from streamrl_jax.control.admin import add_pool_admin
from streamrl_jax.control.controller import Controller
from streamrl_jax.control.events import ControlEvent, EventKind
from streamrl_jax.errors import UserError
from streamrl_jax.gen import net
from streamrl_jax.gen.join import Announcer, Myself, advertised
from streamrl_jax.gen.launch.fleet import Fleet
from streamrl_jax.gen.options import EngineOptions, InstanceSpec, JoinSpec, PoolTemplate, write_spec
from streamrl_jax.gen.whereabouts import CONTROL_FILE
from streamrl_jax.rundir import create, look
from streamrl_jax.setup.joining import Secrets, joining
from streamrl_jax.setup.security import run_access
from streamrl_jax.types import WeightSource
from tests.fakes import FakeEngine

from .control_world import SETTINGS, Process, Run, World, decode, job, manifest, reward_by_length


@dataclass
class Making:
    """Starts the instances of a `World`, under any name."""

    world: World

    @property
    def names(self) -> Sequence[str]:
        return self.world.names

    async def start(self, name: str) -> Process:
        return await self.world.start(name)

    def admit(self, spec: InstanceSpec) -> None:
        """The world knows every name."""

    def forget(self, name: str) -> None:
        """The world keeps its lives."""

    def host(self, name: str) -> str:
        return "here"


@dataclass
class Scene:
    """A run directory, and a controller that serves it."""

    home: Path
    run: Run
    access: net.Access

    def cli(self, command: str, *arguments: str) -> int:
        return main(["pool", command, str(self.home), *arguments])

    def names(self) -> list[str]:
        return [view.name for view in self.run.controller.pool()]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configuration of a run."""
    return tmp_path_factory.mktemp("project")


def engine(name: str, life: int) -> FakeEngine:
    return FakeEngine(slots=8, tokens_per_s=200, length=lambda a: 12)


@contextmanager
def serving(home: Path, names: tuple[str, ...] = ("instance-0",), farewell: bool = True) -> Iterator[Scene]:
    """A controller over a world of instances, with its admin service, as the run in ``home``.

    Without a farewell it looks as if it had been killed: the file that says where it is stays.
    """
    run_dir = look(home)
    access = net.Access.from_files(run_access(Config(), run_dir))
    world = World(names, engine, access=access)
    spec = InstanceSpec("instance", EngineOptions("m", 64))
    pools = (PoolTemplate("instance", spec, tuple("0" for _ in names)), PoolTemplate("long", spec))
    fleet = Fleet(lambda specs: Making(world), pools, {}, lambda taken, size: str(len(taken)), access)
    events: list[ControlEvent] = []
    # A guest that is dead is noticed by the lease.
    settings = replace(SETTINGS, lease_s=5.0, min_instances=0 if names else 1)
    owner = Owner.current()  # as its name says, or it would be swept away
    mark = f"{owner.namespace}.{owner.pid}.{owner.start}.0"
    blob = SHARED_MEMORY / f"{blob_stem(run_dir.fence, 0)}.{mark}.bin"
    blob.touch(0o600)
    try:
        controller = Controller(
            settings, run_dir.fence, fleet, reward_by_length, decode, events.append, access
        )
    except BaseException:
        world.close()
        raise
    scene = Scene(home, Run(world, controller, events), access)

    def on_loop(coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, controller._loop).result(60)  # type: ignore[arg-type]

    async def open_server() -> tuple[object, Callable[[], None], str]:
        server = net.make_server(access)
        close = add_pool_admin(controller._core, server)
        address = net.bind(server, "127.0.0.1:0", access)
        await server.start()
        return server, close, address

    try:
        controller.start()
        server, close, address = on_loop(open_server())  # type: ignore[misc]
        fence = run_dir.fence
        found = {
            "address": address,
            "pid": os.getpid(),
            "run_id": fence.run_id,
            "incarnation": fence.incarnation,
        }
        (home / CONTROL_FILE).write_text(json.dumps(found))
        controller.publish(manifest(0, fence), WeightSource(str(blob)))
        if names:
            controller.wait_ready(60)
        yield scene
        if farewell:
            controller._loop.call_soon_threadsafe(close)
            (home / CONTROL_FILE).unlink()
        on_loop(server.stop(0.5 if farewell else 0))
    finally:
        controller.close()
        world.close()
        blob.unlink()


@pytest.fixture
def home(project: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = project / request.node.name[:40].replace("[", "-").replace("]", "")
    with create(path, dump_config(Config())):
        yield path


# ---------------------------------------------------------------- streamrl pool


def test_list_shows_each_instance_and_who_has_left(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(home, ("instance-0", "instance-1")) as scene:
        scene.run.wait_for(lambda: all(view.version == 0 for view in scene.run.controller.pool()))
        assert scene.cli("list") == 0
        header, *rows = capsys.readouterr().out.splitlines()
        assert header.split() == [
            "name", "state", "version", "slots", "held", "tokens/s", "restarts", "device", "host"
        ]  # fmt: skip
        assert [row.split()[0] for row in rows] == ["instance-0", "instance-1"]
        assert rows[0].split()[2:5] == ["0", "8", "0"]
        assert scene.cli("drain", "instance-1", "--wait", "60") == 0
        assert capsys.readouterr().out == "instance-1: left\n"
        assert scene.cli("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert [entry["name"] for entry in found["instances"]] == ["instance-0"]
        assert found["left"] == {"instance-1": "it was drained"}
        assert (found["run_id"], found["version"]) == (look(home).fence.run_id, 0)


def test_added_ones_take_part_and_drained_ones_leave_with_every_sample_once(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(home) as scene:
        scene.run.controller.submit(job(0, count=125, n=4))
        samples = []
        for sample in scene.run.controller.samples("train/0", 60):
            samples.append(sample)
            if len(samples) == 10:
                scene.run.world.now("instance-0").hang()  # so that it leaves them some
                assert scene.cli("add", "--count", "2") == 0
                assert "instance-1, instance-2: starting" in capsys.readouterr().out
                assert scene.cli("add", "--pool", "long", "--devices", "7") == 0
                assert "long-0" in capsys.readouterr().out
                for name in ("instance-1", "instance-2", "long-0"):
                    scene.run.wait_for(lambda name=name: scene.run.seen(EventKind.UPDATED, name))
                scene.run.world.loop.call_soon_threadsafe(scene.run.world.now("instance-0").engine.thaw)
            if len(samples) == 120:
                assert scene.cli("drain", "instance-1", "instance-2", "--now", "--wait", "60") == 0
        assert len({sample.sample_id for sample in samples}) == len(samples) == 500
        assert {"instance-0", "instance-1", "instance-2", "long-0"} == {
            s.generation.instance for s in samples
        }
        assert scene.names() == ["instance-0", "long-0"]


def test_what_cannot_be_done_is_said_in_a_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(home) as scene:
        for command, expected in (
            (["drain", "instance-0"], "instance-0 is the last instance of the run"),
            (["drain", "instance-9"], "did you mean instance-0? It has instance-0."),
            (["add", "--pool", "lng"], "there is no pool 'lng'; did you mean long?"),
            (["add", "--endpoint", "nowhere"], "is no HOST:PORT"),
            (["add", "--endpoint", "a:1", "--count", "2"], "--endpoint names an instance that runs already"),
            (["add", "--count", "3", "--devices", "0"], "1 entries of devices were given for 3 instances"),
            (["add", "--count", "5000"], "at most 1024 are added at once"),
        ):
            assert scene.cli(*command) == 2
            assert expected in capsys.readouterr().err
        assert scene.names() == ["instance-0"]


def test_numbers_that_are_none_are_refused_before_anything_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in ("-3", "0", "two"):
        with pytest.raises(SystemExit, match="2"):
            main(["pool", "add", str(tmp_path), f"--count={count}"])
        assert "is no number of instances; give 1 or more" in capsys.readouterr().err
    for seconds in ("-4", "inf", "nan", "soon"):
        with pytest.raises(SystemExit, match="2"):
            main(["pool", "drain", str(tmp_path), "instance-0", f"--wait={seconds}"])
        assert "is no time in seconds; give 0 or more" in capsys.readouterr().err


@contextmanager
def no_rights_in(folder: Path) -> Iterator[None]:
    """This process is another user, or as good as one: nothing of the folder can be read."""
    root = os.geteuid() == 0
    folder.chmod(0o700 if root else 0)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_another_users_run_cannot_be_joined(home: Path) -> None:
    run = look(home)
    cfg = Config.model_validate({"security": {"token_file": run_access(Config(), run).token}})
    with (
        no_rights_in(home / "tls"),
        pytest.raises(UserError, match=r"/tls is readable by the run's owner only"),
    ):
        run_access(cfg, run)


def test_an_instance_says_which_run_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="does not exist"):
        joining(str(tmp_path / "later"), [], [], Secrets(), patience_s=0.0)
    assert f"waiting for a run in {tmp_path / 'later'}, at most 0 s" in capsys.readouterr().err


def test_an_endpoint_joins_by_its_address(home: Path) -> None:
    with serving(home) as scene:
        world = scene.run.world
        far = world.call(world.launch("far", 0))
        world.lives["far"] = [far]
        assert scene.cli("add", "--endpoint", far.address) == 0
        scene.run.wait_for(lambda: scene.run.seen(EventKind.UPDATED, "endpoint-0"))
        assert scene.cli("drain", "endpoint-0", "--wait", "60") == 0
        assert not far.stopped, "who started it ends it"


def test_a_run_that_does_not_go_on_is_told_apart(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "list", str(home)]) == 2
    assert "does not go on: it is over, or was stopped" in capsys.readouterr().err
    assert main(["pool", "list", str(home) + "x"]) == 2
    assert "does not exist; there are" in capsys.readouterr().err
    found = {"address": "127.0.0.1:1", "pid": 1, "run_id": "r", "incarnation": 0}
    (home / CONTROL_FILE).write_text(json.dumps(found))
    assert main(["pool", "list", str(home)]) == 2
    assert "does not answer (UNAVAILABLE" in capsys.readouterr().err
    (home / CONTROL_FILE).write_text("{")
    assert main(["pool", "list", str(home)]) == 2
    assert "does not say where the controller is" in capsys.readouterr().err


def test_another_token_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(home) as scene:
        (home / "token").write_text("another\n")
        assert scene.cli("list") == 2
        assert "refuses the token" in capsys.readouterr().err


# ---------------------------------------------------------------- instances that dial in


@contextmanager
def guest(home: Path, name: str, patience_s: float = 120.0) -> Iterator[subprocess.Popen[bytes]]:
    """The process of an instance that dials in, with a fake engine."""
    found = joining(str(home), [], [], Secrets(), patience_s=patience_s)
    spec = InstanceSpec(
        name,
        EngineOptions("", 64, max_num_seqs=8),
        listen=found.listen,
        access=found.access,
        address_file=str(home / f"{name}.address"),
        join=found.join,
    )
    file = home / f"{name}.json"
    write_spec(spec, file)
    command = [sys.executable, "-m", "tests.fake_instance", "--spec", str(file)]
    with (home / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def test_a_run_waits_for_instances_that_dial_in_and_they_end_with_it(home: Path) -> None:
    with guest(home, "node-a") as first, guest(home, "node-b") as second:
        with serving(home, ()) as scene:
            scene.run.controller.submit(job(0, count=20, n=4))
            scene.run.controller.wait_ready(60)
            samples = list(scene.run.controller.samples("train/0", 60))
            assert len({s.sample_id for s in samples}) == 80
            scene.run.wait_for(lambda: sorted(scene.names()) == ["node-a", "node-b"])
        assert (first.wait(60), second.wait(60)) == (0, 0)
    assert "the run is over; it ends" in (home / "logs" / "node-a.log").read_text()


def test_a_guest_that_is_drained_ends_itself(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(home) as scene, guest(home, "node-a") as process:
        scene.run.wait_for(lambda: scene.run.seen(EventKind.UPDATED, "node-a"))
        assert scene.cli("list") == 0
        assert "(dialled in)" in capsys.readouterr().out
        assert scene.cli("drain", "node-a", "--wait", "60") == 0
        assert process.wait(60) == 0
        assert scene.names() == ["instance-0"]
    assert "does not need it any more: it was drained" in (home / "logs" / "node-a.log").read_text()


def test_a_guest_that_dies_and_comes_again_is_let_in_again(home: Path) -> None:
    with serving(home) as scene:
        with guest(home, "node-a") as first:
            scene.run.wait_for(lambda: scene.run.seen(EventKind.UPDATED, "node-a"))
            first.send_signal(signal.SIGKILL)
            first.wait(60)
            before = len(scene.run.seen(EventKind.UPDATED, "node-a"))
        with guest(home, "node-a"):
            scene.run.wait_for(lambda: len(scene.run.seen(EventKind.UPDATED, "node-a")) > before)
            scene.run.controller.submit(job(0, count=20, n=4))
            assert len(list(scene.run.controller.samples("train/0", 60))) == 80


def test_a_guest_finds_the_next_life_of_the_run(home: Path) -> None:
    """The controller is killed, as far as the guest can tell, and another one is at another address."""
    with guest(home, "node-a") as process:
        with serving(home, (), farewell=False) as scene:
            scene.run.controller.wait_ready(60)
        assert process.poll() is None
        with serving(home, ()) as scene:
            scene.run.controller.wait_ready(60)
            scene.run.controller.submit(job(0, count=5, n=4))
            assert len(list(scene.run.controller.samples("train/0", 60))) == 20
        assert process.wait(60) == 0


def test_a_guest_that_never_finds_a_controller_ends_with_an_error_after_its_patience(home: Path) -> None:
    found = {"address": "127.0.0.1:1", "pid": 1, "run_id": "r", "incarnation": 0}
    (home / CONTROL_FILE).write_text(json.dumps(found))
    join = JoinSpec(run_dir=str(home), patience_s=1.5)
    announcing = Announcer(join, Myself("a", "127.0.0.1:2", 1, 64), net.OPEN).run()
    with pytest.raises(
        UserError, match=r"127\.0\.0\.1:1 did not answer for 1\.5 s, and never did: see whether"
    ):
        asyncio.run(asyncio.wait_for(announcing, 60))


def test_names_of_others_are_refused(home: Path) -> None:
    with serving(home), guest(home, "instance-0") as process:
        assert process.wait(60) != 0
    assert (
        "an instance called 'instance-0' is in the pool already"
        in (home / "logs" / "instance-0.log").read_text()
    )


@pytest.mark.parametrize(
    ("bound", "host", "expected"),
    [
        ("127.0.0.1:7", "", "127.0.0.1:7"),
        ("0.0.0.0:7", "node3.cluster", "node3.cluster:7"),
        ("0.0.0.0:7", "", "127.0.0.1:7"),
        ("[::]:7", "fe80::1", "[fe80::1]:7"),
    ],
)
def test_the_address_that_others_are_told(bound: str, host: str, expected: str) -> None:
    assert advertised(bound, host, "127.0.0.1:9") == expected
