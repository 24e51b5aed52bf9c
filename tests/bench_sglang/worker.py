"""A worker process: PARENT_PID. The roles lie beside this file."""

import sys

from kvferry.bench import child

if __name__ == "__main__":
    sys.exit(child.main(sys.argv[1:]))
