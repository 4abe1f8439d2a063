"""`python -m headrace`: the command line, where no `headrace` is on the path."""

from headrace.cli import main

if __name__ == "__main__":
    main()
