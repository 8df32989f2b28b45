"""`python -m trainwright` is equivalent to the command `trainwright`."""

from trainwright.launch.local import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()  # before the imports of a command, which take seconds

    from trainwright.cli import main

    main()
