"""``python -m attnbench``, the same as the ``attnbench`` command."""

from .cli import main

if __name__ == "__main__":
    main()
