"""`python -m minisgl.verify MODEL`, the same as `minisgl verify MODEL`."""

import sys

from minisgl.verify.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
