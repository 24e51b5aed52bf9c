import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # standin_memory is a module that second processes import, too
