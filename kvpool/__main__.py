"""``python -m kvpool``: the command line, where its script is not on the PATH."""

from kvpool.cli import main

if __name__ == "__main__":
    main()
