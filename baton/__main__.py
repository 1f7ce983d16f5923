"""`python -m baton`: the way to the operator's tools, which this package does not know otherwise."""

import sys

if __name__ == "__main__":
    from operations.commands import main

    sys.exit(main(sys.argv[1:]))
