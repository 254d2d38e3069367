"""`python -m jaxgoodput` is the command `jaxgoodput`."""

from jaxgoodput.cli import main

raise SystemExit(main())
