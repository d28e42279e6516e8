"""`python -m pdserve`."""

from pdserve.cli import main

if __name__ == "__main__":
    main()
