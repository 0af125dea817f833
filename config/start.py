"""What a program that is started does before it loads its libraries, which takes seconds. Importing this does it."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

if sys.version_info < (3, 11) or not find_spec("pyspiel"):  # which no other environment is likely to have
    root, version = Path(__file__).resolve().parents[1], ".".join(map(str, sys.version_info[:2]))
    print(f"error: this is Python {version} of {sys.executable}, not of this project: "
          f"source {root}/.venv/bin/activate (bash {root}/scripts/setup.sh makes it)", file=sys.stderr)  # fmt: skip
    raise SystemExit(2)
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no traceback; ``setup_logging`` takes it back
