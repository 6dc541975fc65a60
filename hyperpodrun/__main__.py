"""`python -m hyperpodrun` is the console command `hyperpodrun`."""

from hyperpodrun.cli.entry import main

if __name__ == "__main__":
    main()
