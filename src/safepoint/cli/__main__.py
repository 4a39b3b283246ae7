"""Run the command line as ``python -m safepoint.cli``."""

import sys

from safepoint.cli.entry import main

sys.exit(main())
