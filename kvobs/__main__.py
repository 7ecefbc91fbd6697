"""``python -m kvobs`` is ``kvobs``."""

import sys

from kvobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
