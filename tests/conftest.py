"""For all tests."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # engine_here is a module of its own

# a shell without job control starts background jobs with SIGINT ignored, and every process below inherits it
signal.signal(signal.SIGINT, signal.default_int_handler)
