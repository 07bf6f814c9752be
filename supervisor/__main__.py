"""`python -m supervisor` is the `supervisor` command."""

from supervisor.cli import main

if __name__ == "__main__":
    main()
