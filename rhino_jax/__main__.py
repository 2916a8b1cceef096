"""`python -m rhino_jax`: see `rhino_jax.cli`."""

from __future__ import annotations

import sys

from rhino_jax.cli import main


if __name__ == "__main__":
    sys.exit(main())
