"""What a program that is started does before it loads its libraries, which takes seconds. Importing this does it."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

# What every program loads: pyspiel is in hardly another environment, and an installation may have been interrupted.
NEEDED = "pyspiel", "torch", "numpy", "transformers", "peft", "safetensors", "httpx", "psutil", "rich", "tabulate"

absent = [name for name in NEEDED if not find_spec(name)]
if sys.version_info < (3, 11) or absent:
    root, version = Path(__file__).resolve().parents[1], ".".join(map(str, sys.version_info[:2]))
    lacks = f"without {', '.join(absent)}" if absent else "too old"
    print(f"error: this is Python {version} of {sys.executable}, {lacks}: "
          f"source {root}/.venv/bin/activate (bash {root}/scripts/setup.sh makes it)", file=sys.stderr)  # fmt: skip
    raise SystemExit(2)
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no traceback; ``setup_logging`` takes it back
