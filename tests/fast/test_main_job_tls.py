"""A whole run over TLS in both directions, on addresses that other hosts could reach."""

from __future__ import annotations

import stat
from pathlib import Path

from streamrl_jax.cli import main
from streamrl_jax.gen import tls

from .job_world import jax_settings_kept, left_behind, metrics_of, write_config, write_world


def test_a_run_whose_parts_listen_to_the_world_encrypts_everything(tmp_path: Path) -> None:
    with jax_settings_kept():
        world = write_world(tmp_path / "world")
        config = write_config(
            world,
            run={"name": "tls"},
            gen={"instances": 1, "listen": "0.0.0.0"},
            bridge={"transport": "grpc", "listen": "0.0.0.0:0"},
            security={"tls": "on", "mutual_tls": True},
            trainer={"total_training_steps": 2, "save_freq": 0, "test_freq": 0},
        )
        assert main(["train", str(config)]) == 0
    run = world / "runs" / "tls"
    assert len(metrics_of(run)) == 2
    assert left_behind(run) == []
    for name in (tls.CA_FILE, tls.CERT_FILE, tls.KEY_FILE):
        assert stat.S_IMODE((run / "tls" / name).stat().st_mode) == 0o600
    material = tls.read(*(str(run / "tls" / name) for name in (tls.CA_FILE, tls.CERT_FILE, tls.KEY_FILE)))
    assert material.name.startswith("streamrl-tls-")
