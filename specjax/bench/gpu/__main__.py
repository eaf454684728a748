"""`python -m specjax.bench.gpu`."""

import sys
from functools import partial

from specjax.bench.gpu.report import parse, report
from specjax.core.errors import exit_code

if __name__ == "__main__":
    sys.exit(exit_code(partial(report, parse(sys.argv[1:]))))
