"""`python -m fusedlayers.bench` is `python -m fusedlayers bench`."""

import sys

from . import main

sys.exit(main())
