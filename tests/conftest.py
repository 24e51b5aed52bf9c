"""For all tests."""

import signal

# a shell without job control starts background jobs with SIGINT ignored, and every process below inherits it
signal.signal(signal.SIGINT, signal.default_int_handler)
