"""``python -m moe``."""

import sys

from moe.cli import main

sys.exit(main())
