"""Runs the `modelpool` command: `python -m modelpool`."""

from modelpool.actors.cli.main import main

if __name__ == "__main__":
    main()
