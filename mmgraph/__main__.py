"""``python -m mmgraph``."""

from mmgraph.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
