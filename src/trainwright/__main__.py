"""`python -m trainwright` is the command `trainwright`."""

from trainwright.cli import main

if __name__ == "__main__":
    main()
