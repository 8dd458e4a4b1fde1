"""`python -m streamrl_jax` is `streamrl`."""

import sys

from streamrl_jax.cli import main

sys.exit(main())
