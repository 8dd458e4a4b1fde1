"""``python -m streamrl_jax.gen --spec FILE.json``: becomes the instance's process."""

from __future__ import annotations

import sys

from streamrl_jax.gen.instance import become_instance

if __name__ == "__main__":
    become_instance(sys.argv[1:])
