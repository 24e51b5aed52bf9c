"""`python -m kvferry`."""

import sys

from kvferry.cli.main import main

sys.exit(main())
