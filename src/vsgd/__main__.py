"""`python -m vsgd` is the `vsgd` command."""

import sys

from vsgd.cli import main

sys.exit(main())
