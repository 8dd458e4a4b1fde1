"""Where a run's controller is found: ``RUN_DIR/control.json``, which lies there as long as the run goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl_jax.errors import UserError
from streamrl_jax.types import Fence

CONTROL_FILE: Final = "control.json"
"""Name of the file; the controller writes it whole, readable by its owner only, and removes it at its end."""


@dataclass(frozen=True)
class Whereabouts:
    """Where a controller answers, and for whom."""

    address: str
    pid: int
    fence: Fence


def find_controller(run_dir: Path) -> Whereabouts | None:
    """Reads where the controller of a run is.

    Args:
        run_dir: the run directory.

    Returns:
        Its whereabouts, also of one that was killed; None: the run is over, or has not got so far.

    Raises:
        UserError: the file holds something else.
    """
    path = run_dir / CONTROL_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Whereabouts(
            str(fields["address"]),
            int(fields["pid"]),
            Fence(str(fields["run_id"]), int(fields["incarnation"])),
        )
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise UserError(
            f"{path} is readable by the run's owner only; call this as the user who started the run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not say where the controller is ({type(error).__name__}: {error}); it was changed by hand: "
            "remove it, and go on with streamrl train --resume"
        ) from error
