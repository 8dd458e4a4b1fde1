"""A controller in a process of its own over counting instances, for `streamrl bench stream`.

``python -m streamrl_jax.bench.counting_controller SETTING.json``: serves as a run's controller does, says where on its
standard output, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from streamrl_jax.bench.stream_rounds import FENCE, Setting, launcher, reward
from streamrl_jax.control.core import ControllerCore
from streamrl_jax.control.hub import Hub
from streamrl_jax.control.rewards import RewardWorkers
from streamrl_jax.control.server import RunControlService, Serving, serve
from streamrl_jax.gen import net
from streamrl_jax.gen.parentage import die_with


async def _run(setting: Setting, home: Path) -> None:
    settings = setting.control()
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), told.set)
    rewards = RewardWorkers(reward, lambda ids: "", settings.reward_timeout_s, settings.reward_workers)
    hub = Hub(1, lambda event: None)
    core = ControllerCore(settings, FENCE, launcher(home, setting, FENCE), rewards, hub.event)
    rewards.start()
    async with serve(RunControlService(core, hub, told.set), core, Serving(net.OPEN)) as address:
        core.begin()
        print(address, flush=True)
        await told.wait()
        await core.end()
    rewards.close(1.0)


def main() -> None:
    """Serves until it is told to end."""
    die_with(os.getppid())
    path = Path(sys.argv[1])
    setting = Setting.from_json(json.loads(path.read_text()))
    if setting.core >= 0:
        os.sched_setaffinity(0, {setting.core})
    asyncio.run(_run(setting, path.parent))


if __name__ == "__main__":
    main()
