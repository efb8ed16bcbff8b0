"""`python -m actors.cli`: the `modelpool` command where it is not installed as one."""

from actors.cli.main import main

if __name__ == "__main__":
    main()
