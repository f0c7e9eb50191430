"""``python -m kvjax``: the same as the command ``kvjax``."""

from kvjax.cli import main

if __name__ == "__main__":
    main()
