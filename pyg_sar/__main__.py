"""``python -m pyg_sar`` is the command ``pyg-sar``."""

import sys

from pyg_sar.cli import main

sys.exit(main())
